"""``tandemrt check --invariance``: texts of the same requests in many ways."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.export.bundle.build import build
from tandemrt.runtime.check.invariance import check_invariance
from tandemrt.runtime.requests.running import RunningRequest
from tests.command_line import app
from tests.makers import tiny_checkpoint, write_recipe

PROMPTS = [[3, 9, 27], [5] * 80, list(range(20, 60)), list(range(40, 10, -1)), [1]]
CPU = RuntimeOptions(device="cpu", threads=1)


@pytest.fixture(scope="module")
def paged_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("paged")
    backend = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]'
    drafting = 'kind = "ngram"\nnum_draft_tokens = 2\nngram_min = 1'
    target = tiny_checkpoint(folder / "target", head_dim=32)
    recipe = write_recipe(folder / "r.toml", target=target, drafting=drafting, backend=backend, length=192)
    return build(Recipe.load(recipe), folder / "bundle").folder


def test_no_text_parts_on_a_cpu(paged_bundle: Path) -> None:
    results = {result.check: result for result in check_invariance(paged_bundle, CPU, PROMPTS)}
    preempted = next(check for check in results if "preempted" in check)
    assert [check for check in results if check != preempted] == [
        "texts: 1 drafted token",
        "texts: 2 drafted tokens",
        "texts: 1 request at a time",
        "texts: 2 requests at a time",
        "texts: 4 requests at a time",
        "texts: prompts in chunks of 16 tokens while others decode",
        "texts: an empty prefix cache",
        "texts: prompts in the prefix cache",
        "texts: a next turn whose first turn is in the prefix cache",
    ]
    assert {result.verdict for result in results.values()} == {"pass"}, results
    assert all(result.numbers["parted"] == 0 for result in results.values())
    assert results["texts: prompts in the prefix cache"].numbers["cached"] == BLOCK_SIZE
    assert "times" in preempted


def test_texts_that_part_are_counted_and_named_with_their_place(
    paged_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit: Callable[..., Any] = RunningRequest.commit

    def one_token_after_drafts(self: RunningRequest, emitted: Any, drafted: int, *rest: Any) -> Any:
        return commit(self, [5] if drafted else emitted, drafted, *rest)

    monkeypatch.setattr(RunningRequest, "commit", one_token_after_drafts)
    first = next(check_invariance(paged_bundle, CPU, PROMPTS))
    assert first.verdict == "fail"
    assert first.numbers["parted"] > 0
    assert "parts at token" in first.result


def test_the_command_reads_prompts_and_writes_a_report(paged_bundle: Path, tmp_path: Path) -> None:
    prompts, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    prompts.write_text('{"prompt": "hello the world"}\n{"prompt": "and the"}\n')
    arguments = ["check", str(paged_bundle), "--invariance", "--prompts", str(prompts), "--json", str(report)]
    ran = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--threads", "1"])
    assert ran.exit_code == 0, ran.output
    findings = json.loads(report.read_text())["findings"]
    assert {row["verdict"] for row in findings} <= {"pass", "not applicable"}
    assert findings[0]["numbers"]["texts"] == 2
    assert "2 of 2 texts equal" in ran.output
    compared = sum(row["numbers"].get("texts", 0) for row in findings)
    assert f"{compared} texts compared, none parted" in ran.output
    cached = [row["verdict"] for row in findings if row["check"] == "texts: prompts in the prefix cache"]
    assert cached == ["not applicable"]  # these prompts fill no block


@pytest.mark.parametrize(
    "options",
    [
        ["--prompts", "x"],
        ["--compare-with", "x"],
        ["--text", "y"],
        ["--invariance", "--compare-with", "x", "--text", "y"],
    ],
)
def test_options_of_different_checks_are_refused(options: list[str]) -> None:
    refused = CliRunner().invoke(app, ["check", "no bundle", *options])
    assert isinstance(refused.exception, BadRequest)
    assert options[0] in str(refused.exception)
    assert "no bundle" not in str(refused.exception)

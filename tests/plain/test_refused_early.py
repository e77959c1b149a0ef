"""Invalid commands and requests are rejected before slow imports and before an engine opens."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.bundle.manifest import Manifest
from tandemrt.engines.parameters.fit import require_fit
from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import BadRequest
from tests.plain.test_bundle import write_bundle

# Runs commands one after the other; prints how each ends, and the slow libraries that are imported by then.
PROBE = """
import io, json, sys
from contextlib import redirect_stderr
import tandemrt.cli
for arguments in json.load(sys.stdin):
    sys.argv[1:] = arguments
    with redirect_stderr(io.StringIO()) as printed:
        try:
            tandemrt.cli.main()
        except SystemExit as ended:
            code = ended.code
    loaded = [name for name in ("torch", "transformers", "onnxruntime") if name in sys.modules]
    print(json.dumps([code, loaded, printed.getvalue()]))
"""
REJECTED = [
    (["run", "./nowhere", "hello"], "BadBundle: model: './nowhere' does not exist. Correct the path"),
    (["run", "dem", "hello"], "BadBundle: model: must be a path, the name of an included recipe, or OWNER/NAME on"),
    (["run", "sample", "hello", "--dtype", "int4"], "BadRequest: dtype: 'sample' is built already"),
    (
        ["bench", "."],
        "BadBundle: model: a bundle's folder has bundle.json, a checkpoint's folder has config.json; '.'",
    ),
    (["check", "nowhere"], "BadBundle: bundle: 'nowhere' does not exist. Correct the path, or build it: tandemrt"),
    (["run", "sample", "hello", "--threads", "0"], "BadRequest: threads: must be at least 1, received 0"),
    (
        ["run", "sample", "hello", "--num-draft-tokens", "1:4,9:x"],
        "BadRequest: num_draft_tokens: must be a number, or a table",
    ),
    (
        ["bench", "sample", "--num-draft-tokens", "9"],
        "BadRequest: num_draft_tokens: the bundle was built for 0..4 drafted tokens",
    ),
    (
        ["check", "sample", "--cache-tokens", "64"],
        "BadRequest: cache_tokens: this bundle's cache is linear",
    ),
    (["run", "sample", "hello", "--temperature", "-1"], "BadRequest: temperature: must be at least 0.0"),
    (["run", "sample", "hello", "--max-tokens", "32"], "BadRequest: max_tokens: prompt and output must fit"),
    (["run", "sample", "hello", "--schema", "no.json"], "BadRequest: --schema: must be a readable JSON file"),
    (["bench", "sample", "--prompts", "no.jsonl"], "BadRequest: --prompts: must be a readable file, received no."),
    (
        ["calibrate", "sample", "--prompts", "no.jsonl", "--temperature", "1", "--temperature", "0"],
        "BadRequest: --temperature: must be above 0, so that drafts are sampled, received 0",
    ),
]


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """How each of the REJECTED commands ends, by its arguments: all run in one process, because its start is slow."""
    folder = tmp_path_factory.mktemp("commands")
    write_bundle(folder / "sample")
    commands = json.dumps([arguments for arguments, _ in REJECTED])
    probe = [sys.executable, "-c", PROBE]
    done = subprocess.run(probe, cwd=folder, input=commands, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return {" ".join(arguments): json.loads(line) for (arguments, _), line in zip(REJECTED, lines, strict=True)}


@pytest.mark.parametrize(
    ("arguments", "message"), REJECTED, ids=lambda value: " ".join(value) * isinstance(value, list)
)
def test_commands_reject_arguments_before_importing_torch(
    ends: dict[str, Any], arguments: list[str], message: str
) -> None:
    code, loaded, printed = ends[" ".join(arguments)]
    assert (code, loaded) == (2, [])
    assert printed.startswith(message)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            {"max_tokens": 32},
            r"max_tokens: prompt and output must fit the engine's length 32, received 32; .* at most 31",
        ),
        ({"num_draft_tokens": 5}, "num_draft_tokens: this runtime drafts at most 4 tokens per round, received 5"),
        ({"logit_bias": {92: 1.0}}, r"logit_bias: token ids must be in 0\.\.91, received 92"),
    ],
)
def test_requests_are_checked_against_the_manifest_alone(tmp_path: Path, params: dict[str, Any], message: str) -> None:
    manifest = write_bundle(tmp_path / "sample").manifest
    require_fit(
        SamplingParams(max_tokens=31, num_draft_tokens=4, logit_bias={91: 1.0}, thinking_token_budget=0), manifest
    )
    with pytest.raises(BadRequest, match=message):
        require_fit(SamplingParams(**params), manifest)


def test_the_window_of_the_runtime_is_the_limit_if_it_is_smaller(tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path / "sample").manifest
    require_fit(SamplingParams(num_draft_tokens=2), manifest, 2)
    require_fit(SamplingParams(rule="synthetic", synthetic_acceptance_length=3.0), manifest, 2)
    with pytest.raises(BadRequest, match="num_draft_tokens: this runtime drafts at most 2 tokens per round"):
        require_fit(SamplingParams(num_draft_tokens=3), manifest, 2)
    with pytest.raises(BadRequest, match="with 2 drafted tokens a round emits at most 3 tokens"):
        require_fit(SamplingParams(rule="synthetic", synthetic_acceptance_length=3.5), manifest, 2)


@pytest.mark.parametrize(
    "params", [{"draft_sampling": "greedy"}, {"draft_greedy_below": 0.3}, {"draft_temperature_scale": 0.3}]
)
def test_draft_sampling_is_rejected_for_a_bundle_without_a_draft_model(tmp_path: Path, params: dict[str, Any]) -> None:
    manifest = write_bundle(tmp_path / "sample").manifest

    def drafting(kind: str) -> Manifest:
        return manifest.model_copy(update={"draft": manifest.draft.model_copy(update={"kind": kind})})

    require_fit(SamplingParams(**params), drafting("model"))
    with pytest.raises(BadRequest, match=r"draft_.*: needs a draft model that samples; .*'ngram'.*; leave it"):
        require_fit(SamplingParams(**params), drafting("ngram"))


def test_a_thinking_budget_needs_a_bundle_with_delimiters(tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path / "sample").manifest.model_copy(update={"reasoning": None})
    with pytest.raises(BadRequest, match="thinking_token_budget: this bundle has no reasoning delimiters, received 3"):
        require_fit(SamplingParams(thinking_token_budget=3), manifest)

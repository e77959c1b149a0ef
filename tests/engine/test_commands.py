"""The command line: printed output and exit codes."""

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tandemrt import Chat, SamplingParams
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.export.cli import commands, report
from tandemrt.runtime.cli.bench import Comparison, Measurement
from tandemrt.runtime.cli.calibrate import SCALES, recommendation
from tandemrt.runtime.metrics.metrics import Metrics
from tests.makers import tiny_checkpoint, write_recipe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    tiny_checkpoint(folder / "target", layers=1)
    write_recipe(folder / "tiny.toml", target=folder / "target")
    return folder


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_build_shows_its_steps_and_ends_with_a_summary(run, folder: Path) -> None:
    code, out, err = run("export", "build", "tiny.toml")
    assert (code, err) == (0, "")
    for step in ("Read the checkpoints", "Build, compile and check target/model.onnx", "Take the digest"):
        assert re.search(rf"done +\d+\.\d s +{step}", out)
    assert re.search(r"target onnxruntime-cpu float32 float32, [\d.]+ KB [\d.]+ KB", words(out))
    assert max(map(len, out.splitlines()[:-1])) <= 80
    assert "96 tokens of prompt and output" in out
    assert re.search(r"Bundle tiny built in \d+\.\d s: .*/tiny\n$", out)
    assert Bundle.open(folder / "tiny").name == "tiny"


def test_bundles_go_to_the_projects_own_folder_when_there_is_one(run, folder: Path) -> None:
    (folder / "engines").mkdir()
    try:
        assert run("export", "build", "tiny.toml")[0] == 0
        assert Bundle.open(folder / "engines/built/tiny").name == "tiny"
    finally:
        (folder / "engines").rename(folder / "moved")


def test_the_time_of_a_build_counts_everything(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_load(*arguments: Any, real=Recipe.load, **options: Any) -> Recipe:  # before the first step
        late.append(1000.0)
        return real(*arguments, **options)

    late = [0.0]
    monkeypatch.setattr(commands, "time", SimpleNamespace(perf_counter=lambda: time.perf_counter() + late[-1]))
    monkeypatch.setattr(Recipe, "load", slow_load)
    _, out, _ = run("export", "build", "tiny.toml", "--out", "timed")
    assert re.search(r"Bundle tiny built in 1\d\d\d\.\d s", out)


@pytest.mark.parametrize("dtype", ["int4", "int8"])
def test_build_and_inspect_print_the_dtypes_of_weights_and_of_what_is_computed(run, dtype: str) -> None:
    _, out, _ = run("export", "build", "tiny.toml", "--dtype", dtype, "--out", dtype)
    assert f"target onnxruntime-cpu float32 {dtype}, " in words(out)
    assert f"target onnxruntime-cpu float32 {dtype}, " in words(run("export", "inspect", dtype)[1])


def test_an_interrupted_build_says_so_and_exits_with_130(run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tandemrt.export.bundle.build._require_tokenizer", interrupt)
    code, out, err = run("export", "build", "tiny.toml", "--out", "stopped")
    assert (code, err) == (130, "")
    assert re.search(r"interrupted +\d+\.\d s +Open the tokenizer\n$", out)
    assert "failed" not in out
    assert list(folder.glob("*stopped*")) == []


def test_inspect_prints_a_short_summary(run) -> None:
    run("export", "build", "tiny.toml", "--out", "summary")
    code, out, _ = run("export", "inspect", "summary")
    assert code == 0
    assert len(out.splitlines()) < 40
    assert "past_key" not in out
    assert re.search(r"\d+ files, [\d.]+ KB; built \S+ by tandemrt", out)
    assert "--all also prints" in out


def test_inspect_shows_60_characters_of_a_value() -> None:
    assert report._short("x" * 58) == f'"{"x" * 58}"'
    assert report._short("x" * 59) == f'"{"x" * 58}…'


def test_inspect_reports_that_all_checks_pass(run) -> None:
    run("export", "build", "tiny.toml", "--out", "whole")
    code, out, _ = run("export", "inspect", "whole", "--verify", "--all")
    assert code == 0
    for text in ("'<think>' = [264]", "in past_key float32[batch, 2, 101, 16]", "logits float32[batch, rows, 320]"):
        assert text in words(out)
    assert "Checked sizes, bindings and all digests: everything holds" in words(out)


def test_inspect_names_what_does_not_hold_and_exits_with_1(run, folder: Path) -> None:
    run("export", "build", "tiny.toml", "--out", "damaged")
    (folder / "damaged/verify.onnx").unlink()
    (folder / "damaged/tokenizer/notes.txt").write_text("")
    code, out, _ = run("export", "inspect", "damaged")
    assert code == 1
    assert "verify.onnx must exist; it is missing" in out
    assert "tokenizer/notes.txt must be in the manifest" in out
    assert "2 problem(s)" in out


def test_inspect_finds_engines_whose_bindings_differ_from_the_contract(run, folder: Path) -> None:
    run("export", "build", "tiny.toml", "--out", "swapped")
    manifest = Bundle.open(folder / "swapped").manifest
    engine = manifest.engines["target"]
    token_ids = Binding("token_ids", "int32", ("batch", "query"))
    contract = replace(engine.contract, inputs=(token_ids, *engine.contract.inputs[1:]))
    engines = {**manifest.engines, "target": engine.model_copy(update={"contract": contract})}
    changed = manifest.model_copy(update={"engines": engines})
    (folder / "swapped/bundle.json").write_text(changed.to_json())
    code, out, _ = run("export", "inspect", "swapped")
    assert code == 1
    assert "engine target: input token_ids int64[batch, query] should be token_ids int32[batch, query]" in words(out)


def test_inspect_shows_the_steps_of_a_decoder_and_checks_every_subgraph(run, folder: Path) -> None:
    tiny_checkpoint(folder / "wide", layers=1, head_dim=32)
    backend = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]'
    write_recipe(folder / "paged.toml", target=folder / "wide", backend=backend)
    assert run("export", "build", "paged.toml", "--out", "paged")[0] == 0
    code, out, _ = run("export", "inspect", "paged", "--all")
    assert code == 0
    assert "KB in 4 " in words(out), "the constants and three subgraphs"
    assert "3 subgraphs, 1 window_attention (heads 4, kv_heads 2, sliding_window 0, " in words(out)
    assert "1 swiglu" in words(out)

    manifest = Bundle.open(folder / "paged").manifest
    engine = manifest.engines["target"]
    assert engine.decoder is not None
    values = tuple(replace(v, dtype="float16") if v.name == "hidden.0" else v for v in engine.decoder.values)
    decoder = engine.decoder.model_copy(update={"values": values})
    engines = {**manifest.engines, "target": engine.model_copy(update={"decoder": decoder})}
    (folder / "paged/bundle.json").write_text(manifest.model_copy(update={"engines": engines}).to_json())
    code, out, _ = run("export", "inspect", "paged")
    assert code == 1
    wrong = "hidden.0 float32[tokens, 32] should be hidden.0 float16[tokens, 32]"
    assert f"engine target: output {wrong}" in words(out)
    assert f"engine target: input {wrong}" in words(out)


def test_inspect_speaks_json(run) -> None:
    run("export", "build", "tiny.toml", "--out", "spoken")
    code, out, _ = run("export", "inspect", "spoken", "--json")
    answer = json.loads(out)
    assert (code, answer["holds"], answer["verified"], answer["problems"]) == (0, True, False, [])
    assert answer["manifest"]["limits"]["length"] == 96


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("export", "build", "dmo"),
            "BadBundle: model: must be a path, the name of an included recipe, or OWNER/NAME on the Hugging Face hub; "
            "got 'dmo' (did you mean 'demo'?). Included recipes: demo, demo-cuda, ",
        ),
        (("export", "inspect", "nowhere"), "BadBundle: bundle: 'nowhere' does not exist. Correct the path"),
        (("export", "build", "tiny.toml", "--out", "target"), "BadBundle: out must be free or hold a bundle;"),
    ],
)
def test_a_refused_command_prints_one_message_and_exits_with_2(run, arguments: tuple[str, ...], message: str) -> None:
    code, out, err = run(*arguments)
    assert code == 2
    assert err.startswith(message)
    assert "Traceback" not in out + err


def test_a_failed_build_names_the_step(run, folder: Path) -> None:
    tiny_checkpoint(folder / "short", max_length=64)
    write_recipe(folder / "long.toml", target=folder / "short")
    code, out, err = run("export", "build", "long.toml")
    assert code == 2
    assert re.search(r"failed +\d+\.\d s +Read the checkpoints", out)
    assert "BadRecipe: limits.length must not exceed" in err


@pytest.mark.parametrize("command", [("check",), ("bench",)])
@pytest.mark.parametrize("report", [".", "missing/report.json"])
def test_an_unwritable_report_path_is_refused_before_the_work(run, command, report) -> None:
    code, _, err = run(*command, "a-bundle-that-does-not-exist", "--json", report)
    assert code == 2
    assert words(err) == f"BadRequest: --json: must be a file that can be written, received {report}; name another "


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """What the command line asks the runtime for: how it is opened, then prompt and parameters. It answers nothing."""
    calls: list[tuple[Any, Any]] = []

    class Silent:
        def __init__(self, bundle: Path, **options: Any) -> None:
            calls.append((bundle, options))

        def __enter__(self) -> "Silent":
            return self

        def __exit__(self, *_: object) -> None: ...

        def generate(self, prompt: Any, params: Any) -> None:
            calls.append((prompt, params))
            raise BadRequest("that is all")

        def submit(self, prompt: Any, params: Any, *_: Any, traced: bool) -> None:
            assert traced
            self.generate(prompt, params)

    monkeypatch.setattr("tandemrt.runtime.llm.llm.LLM", Silent)
    return calls


HELLO = [{"role": "user", "content": "hello"}]
RUN: list[tuple[list[str], dict[str, Any], dict[str, Any]]] = [
    ([], {}, {}),
    (["--trace", "out.html"], {"trace": Path("out.html")}, {}),
    (["--max-tokens", "7"], {}, {"max_tokens": 7}),
    (["--budget", "3"], {}, {"thinking_token_budget": 3}),
    (["--seed", "5", "--temperature", "0.5"], {}, {"seed": 5, "temperature": 0.5}),
    (["--num-draft-tokens", "2", "--rule", "rejection"], {"num_draft_tokens": 2}, {"rule": "rejection"}),
]


@pytest.mark.parametrize(("options", "how", "params"), RUN)
def test_run_passes_its_options_on(run, asked, tiny_bundle: Path, options, how, params) -> None:
    assert run("run", str(tiny_bundle), "hello", *options, "--device", "cpu", "--threads", "1")[0] == 2
    opened, sent = asked
    assert opened == (tiny_bundle, {"device": "cpu", "threads": 1, "trace": None} | how)
    assert sent == (Chat(HELLO), SamplingParams(**({"temperature": 0.0} | params)))


def test_run_passes_chat_template_options_on(run, asked, folder: Path, tiny_bundle: Path) -> None:
    (folder / "tools.json").write_text('[{"type": "function"}]')
    template_options = ["--chat-template-kwargs", '{"enable_thinking": false}', "--tools", "tools.json"]
    run("run", str(tiny_bundle), "hello", *template_options)
    expected = Chat(HELLO, chat_template_kwargs={"enable_thinking": False}, tools=[{"type": "function"}])
    assert asked[1][0] == expected
    for wrong in ("{", "[1]"):
        code, _, err = run("run", str(tiny_bundle), "hello", "--chat-template-kwargs", wrong)
        assert code == 2
        assert "template" in err
        assert "kwargs" in err


def test_run_rejects_an_image_for_a_model_that_reads_text_only(run, asked, tiny_bundle: Path) -> None:
    code, _, err = run("run", str(tiny_bundle), "hello", "--image", "receipt.png")
    assert (code, asked) == (2, [])
    assert "--image: this model reads text only, received receipt.png; leave it out" in err


def test_run_raw_skips_the_chat_template(run, asked, tiny_bundle: Path) -> None:
    run("run", str(tiny_bundle), "hello", "--raw")
    assert asked[1][0] == "hello"


def test_bench_passes_its_options_on(run, asked, folder: Path, tiny_bundle: Path) -> None:
    (folder / "prompts.jsonl").write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    options = ["--budget", "3", "--max-tokens", "7", "--temperature", "0.5", "--threads", "1"]
    run("bench", str(tiny_bundle), "--prompts", "prompts.jsonl", *options)
    *opened, (prompts, params) = asked
    assert [how.get("num_draft_tokens") for _, how in opened] == [0, None]
    assert prompts == ["one", [{"role": "user", "content": "two"}]]
    wanted = {"temperature": 0.5, "max_tokens": 7, "thinking_token_budget": 3}
    assert params == [SamplingParams(seed=seed, **wanted) for seed in (0, 1)]


def test_calibrate_prints_every_scale_and_the_best(run, folder: Path, tiny_bundle: Path) -> None:
    lines = '{"prompt": "one", "schema": {"type": "boolean"}}', '{"messages": [{"role": "user", "content": "two"}]}'
    (folder / "one.jsonl").write_text("\n".join(lines))
    options = ["--requests", "2", "--max-tokens", "4", "--temperature", "1", "--temperature", "0.5", "--threads", "1"]
    code, out, _ = run("calibrate", str(tiny_bundle), "--prompts", "one.jsonl", *options)
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.startswith(" ")]
    assert rows[0][0] == "temperature_scale"
    assert [row[0] for row in rows[1:]] == [f"{scale:g}" for scale in sorted(SCALES)]
    assert "at 0.5 at 1 mean" in re.sub(r"[^\w.]+", " ", out)
    assert "temperature_scale" in out.splitlines()[-1]


def test_calibrate_never_recommends_the_default() -> None:
    means = dict.fromkeys(SCALES, 2.0)
    assert recommendation(means) == (
        "no other scale accepts more than 1, the default: leave temperature_scale out of the recipe"
    )
    assert recommendation(means | {0.4: 3.0}) == "temperature_scale = 0.4: acceptance length 1.500 times that of 1"


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ('{"prompt": "one"}', ["--num-draft-tokens", "0"], "--num-draft-tokens: must be above 0"),
        ('{"prompt": "one"}', ["--temperature", "0"], "--temperature: must be above 0"),
    ],
)
def test_calibrate_refuses_arguments_that_it_cannot_measure(
    run, folder: Path, tiny_bundle: Path, line: str, options: list[str], message: str
) -> None:
    (folder / "asked.jsonl").write_text(line + "\n")
    code, _, error = run("calibrate", str(tiny_bundle), "--prompts", "asked.jsonl", *options)
    assert code != 0
    assert message in " ".join(error.split())


def test_speedup_is_time_without_over_time_with_speculation() -> None:
    autoregressive, speculative = (
        Measurement([], seconds, 60, 0, 0, 1.0, [], {}) for seconds in ([6.0, 4.0, 9.0], [3.0, 2.0, 3.0])
    )
    assert Comparison(autoregressive, speculative, 0).speedup == 2.0
    assert (autoregressive.tokens_per_second, speculative.tokens_per_second) == (10.0, 20.0)


def test_bench_figures_are_per_round_and_per_draft_window() -> None:
    metrics = Metrics(rounds=4, steps=5, accepted=[5, 2, 0])
    metrics.seconds["fill"] = 0.02
    assert metrics.host_ms_per_round["fill"] == 5.0
    assert metrics.acceptance_length == 1 + 7 / 5
    assert metrics.acceptance_per_position == [1.0, 0.4, 0.0]

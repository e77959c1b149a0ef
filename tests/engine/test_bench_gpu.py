"""``tools.bench.gpu`` on a CPU with small shapes: every part runs, and failed parts are reported."""

import json
import sys

import pytest
import typer

from tools.bench.acceptance import draft_lengths
from tools.bench.gpu import __main__ as bench_gpu
from tools.bench.gpu.models import make_bundle
from tools.bench.gpu.trace import summary
from tools.models.random_checkpoint import Dtype, Size
from tools.models.random_pair import write_pair


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    write_pair(folder, Size.SMALL, device="cpu", dtype=Dtype.FLOAT32, acceptance=None, scale=0.2)
    return folder


@pytest.fixture
def bench(models, tmp_path, monkeypatch, capsys):
    """Run the command with small shapes; return the exit code, the output and the figures."""

    def run(*arguments: str) -> tuple[int, str, dict]:
        out = tmp_path / "figures.json"
        sizes = ["--size", "small", "--batches", "1,3", "--prompt", "20", "--chunk", "32", "--constrained", "3"]
        sizes += ["--texts", "0", "--prompts", "", "--arrivals", "0", "--long", "0"]
        fixed = ["--device", "cpu", "--models", str(models), "--pairs", "1", "--json", str(out), *sizes]
        monkeypatch.setattr(sys, "argv", ["bench_gpu", *fixed, *arguments])
        with pytest.raises(SystemExit) as caught:
            typer.run(bench_gpu.main)
        return int(caught.value.code or 0), capsys.readouterr().out, json.loads(out.read_text())

    return run


def test_every_line_is_measured_with_and_without_speculation(bench):
    code, out, figures = bench("--tokens", "24", "--length", "256", "--texts", "3")
    assert code == 0, out
    assert "no part failed" in out
    assert figures["ties"].pop("accepted") > 0
    assert figures["ties"] == {"texts": 3, "tokens": 64, "diverged": 0, "at": []}
    for batch in (1, 3):
        both = figures[f"batch {batch}"]
        assert both["autoregressive"]["acceptance_length"] == 1
        assert 2 < both["speculative"]["acceptance_length"] <= 5
        for line in (both["autoregressive"], both["speculative"]):
            assert line["tokens"] >= 24 * batch
            assert line["finished_early"] == 0
            assert line["device_ms"]["round"] == pytest.approx(line["ms_per_round"], rel=0.5)
            assert line["device_ms"]["target"] > line["target_floor_ms"]
        assert both["autoregressive"]["rounds"] >= 24
    assert out.count("\n| 3 |") == 2


def test_a_model_with_experts_is_made_and_its_drafts_are_accepted_by_rule(bench, tmp_path):
    arguments = ["--family", "qwen3_moe", "--layers", "2", "--models", str(tmp_path / "experts")]
    code, out, figures = bench(*arguments, "--batches", "2", "--constrained", "0", "--tokens", "24", "--length", "128")
    assert code == 0, out
    autoregressive, speculative = (figures["batch 2"][name] for name in ("autoregressive", "speculative"))
    assert speculative["acceptance_length"] == pytest.approx(3, abs=0.4)
    assert autoregressive["target_floor_ms"] < speculative["target_floor_ms"], "ten tokens choose more experts than two"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft", "eagle3", "--draft-weights", "int4"], "must be unquantized or fp8 for a draft of kind eagle3"),
        (["--draft", "pard", "--weights", "int4"], "got int4; name one of them"),
        (
            ["--weights", "fp8", "--draft-weights", "unquantized"],
            "is stored in the format of its target, fp8; got unquantized",
        ),
    ],
    ids=str,
)
def test_an_unsupported_draft_format_is_refused_before_models_are_made(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_gpu", *arguments])
    monkeypatch.setattr(bench_gpu, "make_models", lambda *_, **__: pytest.fail("models were made"))
    with pytest.raises(SystemExit) as caught:
        typer.run(bench_gpu.main)
    assert caught.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_budgets_and_grammars_act_during_the_measurement(bench):
    _, _, figures = bench("--tokens", "24", "--length", "256")
    (run,) = figures["constrained"]["constrained"]
    assert run["forced_ends"] >= 2, "a random text may end its reasoning itself, but rarely two of three do"
    assert run["constraint_rejected_drafts"] > 0
    assert figures["constrained"]["unconstrained"][0]["forced_ends"] == 0


def test_prompts_are_measured_alone_with_cached_prefixes_during_decoding_and_long(bench):
    rounds_left_out = ["--batches", "", "--constrained", "0", "--no-trace"]
    sizes = ["--prompts", "1,3", "--shared", "10", "--arrivals", "2", "--long", "300", "--length", "512"]
    sizes += ["--chunk-while-decoding", "9"]
    code, out, figures = bench(*rounds_left_out, *sizes)
    assert code == 0, out
    ends = ("one token each", "decoding goes on")
    lines = [f"{count} x window {window}, {end}" for end in ends for window in (0, 4) for count in (1, 3)]
    assert list(figures["prompts"]) == lines
    assert all(len(figures["prompts"][line]) == 3 for line in lines)
    assert list(figures["shared beginnings"]) == ["1", "3"]
    assert len(figures["long prompt"]["first_tokens_ms"]) == 3
    for part in (f"arrivals, {window} draft tokens, chunk {chunk}" for window in (0, 4) for chunk in ("default", "9")):
        measured = figures[part]
        assert measured["tokens_decoded"] >= 2
        assert 0 < measured["gap_p50_ms"] <= measured["gap_p99_ms"]
        assert 0.1 < measured["work"] < 10
    assert not any(name.startswith("batch") for name in figures)


@pytest.mark.parametrize("kind", ["eagle3", "pard", "dspark", "mtp"])
def test_other_drafts_get_the_requested_acceptance(bench, kind):
    sizes = ["--batches", "1", "--constrained", "0", "--length", "256", "--tokens", "12"]
    code, out, figures = bench("--draft", kind, "--acceptance", "2", *sizes)
    assert code == 0, out
    both = figures["batch 1"]
    assert both["autoregressive"]["acceptance_length"] == 1
    assert both["speculative"]["acceptance_length"] == pytest.approx(2, abs=0.2)  # of six or seven rounds
    assert both["speculative"]["device_ms"]["propose"] > 0


def test_existing_models_are_not_used_for_other_models(bench):
    for asked in (["--layers", "2"], ["--family", "qwen3"], ["--size", "1b"], ["--weights", "fp8"]):
        code, _, figures = bench(*asked)
        assert code == 1
        assert "must be the requested model" in figures["models"]["failed"]
        assert "bundle" not in figures


def test_a_bundle_is_reused_only_with_the_options_it_was_built_with(models):
    asked = {"device": "cpu", "batch": 2, "length": 64, "chunk": 16, "window": 2}
    make_bundle(models, "again", **asked)
    begun = (models / "again" / "bundle.json").read_bytes()
    for more in ({}, {"batch": 1}, {"length": 48}):
        assert make_bundle(models, "again", **asked | more, reuse=True).limits.batch == 2
    for more in ({"batch": 3}, {"length": 65}, {"window": 1}, {"chunk": 8}, {"kv_dtype": "float8_e4m3"}):
        option = "num_draft_tokens" if "window" in more else next(iter(more))
        with pytest.raises(ValueError, match=f"must have the requested options to be reused, .*{option[-5:]}"):
            make_bundle(models, "again", **asked | more, reuse=True)
    config = models / "draft" / "config.json"
    had = config.read_text()
    try:
        config.write_text(had + " ")
        with pytest.raises(ValueError, match=r"# draft: config\.json"):
            make_bundle(models, "again", **asked, reuse=True)
    finally:
        config.write_text(had)
    (models / "again.toml").write_text("")
    with pytest.raises(ValueError, match=r"was not built from again\.toml"):
        make_bundle(models, "again", **asked, reuse=True)
    assert (models / "again" / "bundle.json").read_bytes() == begun


def test_adaptive_draft_lengths_are_compared_with_each_fixed_length(models, tmp_path, monkeypatch, capsys):
    sizes = {"device": "cpu", "batch": 2, "length": 128, "chunk": 32, "window": 2}
    bundle = make_bundle(models, "adapting", **sizes).folder
    out = tmp_path / "lengths.json"
    asked = ["--batches", "2", "--prompt", "8", "--tokens", "6", "--repeats", "1", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["draft-lengths", str(bundle), *asked])
    with pytest.raises(SystemExit):
        typer.run(draft_lengths.main)
    figures = json.loads(out.read_text())
    assert list(figures) == ["3.0 x 2", "1.0 x 2", "mixed x 2"]
    assert capsys.readouterr().out.count("of autoregressive") == 3
    for measured in figures.values():
        rates = measured["tokens_per_second"]
        assert list(rates) == ["length 0", "length 1", "length 2", "adaptive"]
        assert measured["of_best"] == rates["adaptive"] / max(
            rate for name, rate in rates.items() if name != "adaptive"
        )


def test_a_failed_part_is_reported_and_the_others_run(bench):
    code, out, figures = bench("--tokens", "200", "--length", "64", "--constrained", "0")
    assert code == 1
    assert "failed: batch 1, batch 3" in out
    assert "all requests ended before the measurement" in figures["batch 1"]["failed"]


def test_idle_time_is_the_time_without_a_kernel_and_that_of_a_kernel_begins_when_earlier_ones_have_ended():
    events = [
        {"name": "void matmul<8, 4>(float*)", "ts": 10.0, "dur": 30.0},
        {"name": "copy", "ts": 20.0, "dur": 10.0},  # overlaps the matmul
        {"name": "void matmul<2, 2>(float*)", "ts": 60.0, "dur": 50.0},
    ]
    times = summary(events[::-1], rounds=2, kernels=2)
    assert times["idle_share"] == pytest.approx(20 / 100)
    assert (times["ms_per_round"], times["launches_per_round"]) == (0.05, 1.5)
    matmul, copy = times["kernels"]
    assert matmul == {"name": "matmul", "ms_per_round": 0.04, "us_each": 40.0}
    assert copy == {"name": "copy", "ms_per_round": 0.0, "us_each": 0.0}
    assert times["gaps"] == [{"before": "matmul", "after": "matmul", "ms_per_round": 0.01, "us_each": 20.0}]

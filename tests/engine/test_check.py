"""``tandemrt check``: good bundles pass, and each defect fails the check that covers it."""

import dataclasses
import hashlib
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandemrt import LLM, SamplingParams
from tandemrt.cli import main
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import FILE_NAME, File, Limits
from tandemrt.engines.contract import contract
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.export.graph.builder import save_model
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.model.weightless import build_verify
from tandemrt.export.passes.cut import cut
from tandemrt.export.passes.transposed_matmuls import fuse_transposed_matmuls
from tandemrt.export.read.checkpoint import Checkpoint, read_header
from tandemrt.export.read.spec import ModelSpec
from tandemrt.runtime.check import texts
from tandemrt.runtime.check.cases import edge_case_batch, reference_verify
from tandemrt.runtime.check.decoder_run import DecodePlan, DecoderRunner, score_at_once
from tandemrt.runtime.check.logits import TOLERANCES
from tandemrt.runtime.check.operators import is_tie
from tandemrt.runtime.check.reference import open_float32, open_float32_steps
from tandemrt.runtime.check.replay import check_replay
from tandemrt.runtime.check.result import CheckResult
from tandemrt.runtime.check.run import check_engines
from tandemrt.runtime.check.texts import GeneratedTexts, compare_texts
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine
from tandemrt.runtime.device.backends.opening import open_engines
from tests.engine.decoding import fused
from tests.makers import tiny_checkpoint, write_recipe
from tools.models.random_checkpoint import Dtype, Family, Size, write_checkpoint

CPU = torch.device("cpu")
TEXTS = 6


@pytest.fixture
def check(monkeypatch, capsys, tmp_path):
    """Run the command on a bundle, with six texts; return the exit code, what was printed and the report."""
    monkeypatch.setattr(texts, "COUNT", TEXTS)

    def run(bundle: Path) -> tuple[int, str, dict]:
        report = tmp_path / "report.json"
        arguments = ["tandemrt", "check", str(bundle), "--threads", "1", "--json", str(report)]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, json.loads(report.read_text(), parse_constant=pytest.fail)

    return run


def verdicts(findings) -> dict[str, str]:
    rows = [f.to_json() if isinstance(f, CheckResult) else f for f in findings]
    return {row["check"]: row["verdict"] for row in rows}


def failed(findings) -> set[str]:
    return {check for check, verdict in verdicts(findings).items() if verdict == "fail"}


@pytest.mark.parametrize("which", ["demo_bundle", "ngram_bundle"])
def test_a_good_bundle_passes_every_check(which, request, check):
    code, out, report = check(request.getfixturevalue(which))
    assert (code, report["holds"], failed(report["findings"])) == (0, True, set())
    assert "everything holds" in out
    verdict_of = verdicts(report["findings"])
    models = {"target", "draft"} if which == "demo_bundle" else {"target"}
    assert {check for check, verdict in verdict_of.items() if verdict == "measured"} == {
        "round of autoregressive decoding",
        "round with speculation",
        "memory",
    }
    assert {f"logits of {model}" for model in models} <= {
        check for check, verdict in verdict_of.items() if verdict == "pass"
    }
    assert verdict_of["graph replay of target"] == "not applicable"
    compared = next(row for row in report["findings"] if row["check"] == "texts with speculation")
    assert compared["numbers"]["equal"] == compared["numbers"]["texts"] == TEXTS


def test_texts_are_not_compared_without_a_draft(tmp_path, check):
    tiny_checkpoint(tmp_path / "target")
    bundle = build(Recipe.load(write_recipe(tmp_path / "plain.toml", target=tmp_path / "target")), tmp_path / "plain")
    code, _, report = check(bundle.folder)
    assert code == 0
    assert verdicts(report["findings"])["texts with speculation"] == "not applicable"


@pytest.fixture
def copied(tiny_bundle, tmp_path) -> Path:
    return Path(shutil.copytree(tiny_bundle, tmp_path / "copied"))


def test_changed_weights_fail_the_digest_check(copied, check):
    weights = copied / "target/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, out, report = check(copied)
    assert code == 1
    assert failed(report["findings"]) == {"files"}
    assert "failed: files" in out


def test_nan_weights_fail_the_logits_and_later_checks(copied, check):
    """Written anew with a matching digest, as by somebody who converted them wrongly."""
    weights = copied / "target/tiles.safetensors"
    stored = read_header(weights)["model.layers.0.mlp.up_proj.weight.tiles"]
    data = bytearray(weights.read_bytes())
    data[stored.offset : stored.offset + stored.nbytes] = b"\xff" * stored.nbytes
    weights.write_bytes(data)
    with_digest_of(copied, "target/tiles.safetensors")
    code, _, report = check(copied)
    assert code == 1
    assert {"logits of target", "poisoned cache of target", "texts with speculation"} == failed(report["findings"])


def test_an_engine_with_other_weights_fails_only_its_logits(tiny_bundle, tmp_path):
    """An engine and a graph from different checkpoints."""
    other = tiny_checkpoint(tmp_path / "other", seed=2)
    draft = tiny_checkpoint(tmp_path / "draft", layers=1, seed=1)
    recipe = write_recipe(tmp_path / "other.toml", target=other, draft=draft, window=8)
    bundle, foreign = Bundle.open(tiny_bundle), build(Recipe.load(recipe), tmp_path / "bundle").folder
    engines = open_engines(bundle, CPU, 1) | {"target": open_engines(Bundle.open(foreign), CPU, 1)["target"]}
    with torch.inference_mode():
        findings = list(check_engines(bundle, engines, 1))
    assert failed(findings) == {"logits of target"}


def test_a_decoder_in_steps_passes_every_check_on_a_cpu(tmp_path):
    target = tiny_checkpoint(tmp_path / "target", seed=1, head_dim=32)
    backend = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]'
    recipe = write_recipe(tmp_path / "paged.toml", target=target, backend=backend)
    bundle = Bundle.open(build(Recipe.load(recipe), tmp_path / "bundle").folder)
    with torch.inference_mode():
        findings = list(check_engines(bundle, open_engines(bundle, CPU, 1), 1))
    seen = verdicts(findings)
    assert seen["logits of target"] == seen["poisoned cache of target"] == "pass"
    assert "fail" not in seen.values()
    scored = findings[0].numbers
    assert {"scored_prefill", "scored_packed", "scored_one"} <= set(scored)


def test_packed_prompt_calls_are_ragged_and_at_most_a_chunk_long():
    plan = DecodePlan.within(Limits(batch=3, length=95, capacity=100, num_draft_tokens=4, prefill_chunk=16), 50)
    calls = [[end - start for start, end in call] for call in plan.packed_prompts()]
    assert [sum(counts) for counts in zip(*calls, strict=True)] == list(plan.prompts)
    assert max(map(sum, calls)) == plan.chunk == 16
    assert any(len(set(counts) - {0}) > 1 for counts in calls)
    assert any(0 in counts for counts in calls)


def test_logits_that_are_a_thousandth_off_fail_in_float32(tiny_bundle, tmp_path):
    checkpoint = tiny_checkpoint(tmp_path / "off", seed=1)
    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"] *= 1.001
    save_file(tensors, weights, {"format": "pt"})
    recipe = write_recipe(tmp_path / "off.toml", target=checkpoint, window=8)
    off = build(Recipe.load(recipe), tmp_path / "bundle").folder
    bundle = Bundle.open(tiny_bundle)
    engines = open_engines(bundle, CPU, 1) | {"target": open_engines(Bundle.open(off), CPU, 1)["target"]}
    with torch.inference_mode():
        result = next(check_engines(bundle, engines, 1))
    assert (result.check, result.verdict) == ("logits of target", "fail")


def test_a_wrong_verification_graph_fails_its_own_checks(tiny_bundle, tmp_path):
    """A graph with the right bindings that ignores the mask."""
    bundle = Bundle.open(tiny_bundle)
    bindings = bundle.contract("verify")
    model = build_verify(vocab=bundle.vocab, dtype="float32", draft_probs=False)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if node.op_type == "token_bitmask":
            ir.convenience.replace_all_uses_with(node.outputs[0], node.inputs[0])
    ir.save(model, tmp_path / "verify.onnx")
    engines = open_engines(bundle, CPU, 1)
    engines["verify"] = OnnxRuntimeEngine.open(tmp_path / "verify.onnx", bindings, threads=1)
    with torch.inference_mode():
        rows = failed(check_engines(bundle, engines, 1))
    assert rows == {"verify, window 0", "verify, window 8", "verify, no filters"}


def test_different_texts_fail_on_a_cpu_with_position_and_distance_from_a_tie(tiny_bundle):
    params = [SamplingParams(temperature=t, seed=3, max_tokens=12, ignore_eos=True) for t in (0.0, 0.9)]
    with LLM(tiny_bundle, threads=1) as llm:
        outputs = llm.generate([[5, 9, 17], [40, 41]], params)
        target = llm.loop.target.engines["target"]
        parted = [dataclasses.replace(o, token_ids=[*o.token_ids[:7], (o.token_ids[7] + 1) % 256]) for o in outputs]
        equal, different = (
            compare_texts(GeneratedTexts(outputs, 1, 1, 1), GeneratedTexts(others, 1, 1, 1), params, target)
            for others in (outputs, parted)
        )
        cut = [dataclasses.replace(o, token_ids=o.token_ids[:5]) for o in outputs]
        shorter = compare_texts(GeneratedTexts(outputs, 1, 1, 1), GeneratedTexts(cut, 1, 1, 1), params, target)
    assert (equal.verdict, equal.result) == ("pass", "2 of 2 equal")
    assert (different.verdict, different.numbers["equal"]) == ("fail", 0)
    assert different.result.count("differs at token 7, where the logits are") == 2
    assert different.result.count("no tie") == 2
    assert (shorter.verdict, shorter.result.count("differs at token 5")) == ("fail", 2)


def test_a_tie_fails_on_a_cpu(tiny_bundle):
    """Two texts part at two tokens whose logits are as close as a GPU may confuse. A CPU computes the same bits."""
    params = [SamplingParams(temperature=0.0, seed=3, max_tokens=12, ignore_eos=True)]
    with LLM(tiny_bundle, threads=1) as llm:
        (output,) = llm.generate([[5, 9, 17]], params)
        target = llm.loop.target.engines["target"]
        runner, context = DecoderRunner(target, 1), [*output.prompt_token_ids, *output.token_ids[:7]]
        with torch.inference_mode():
            for position, token in enumerate(context):
                logits = runner.run(0, torch.tensor([[token]]), [position], torch.tensor([[0]]))[0, 0]
        order = logits.argsort()
        closest = int(logits[order].diff().argmin())
        one, other = order[closest : closest + 2].tolist()
        gap, tie = float(logits[other] - logits[one]), TOLERANCES["float32"] * float(logits.abs().max())
        assert gap <= tie, "256 logits have two that are this close"
        texts = [
            GeneratedTexts([dataclasses.replace(output, token_ids=[*output.token_ids[:7], token])], 1, 1, 1)
            for token in (one, other)
        ]
        result = compare_texts(*texts, params, target)
    assert (result.verdict, result.numbers["equal"], result.numbers["tied"]) == ("fail", 0, 0)
    assert "text 0 differs at token 7" in result.result
    assert "a tie here is below" in result.result


def test_replay_is_not_applicable_if_only_one_call_fits():
    limits = Limits(batch=1, length=8, capacity=25, num_draft_tokens=16, prefill_chunk=4)
    shape = contract.decoder(layers=1, kv_heads=1, head_dim=8, capacity=25, vocab=50, dtype="float32")
    on_a_gpu = SimpleNamespace(device=torch.device("cuda"), capturable=True, contract=shape)  # never asked to run
    finding = check_replay("target", on_a_gpu, limits, DecodePlan.within(limits, 50))
    assert (finding.verdict, finding.numbers) == ("not applicable", {})
    assert finding.result == "only 1 consecutive call fits the capacity 25: none to replay"


@pytest.mark.parametrize(("gap", "tie"), [(1e-6, True), (1e-2, False)])
def test_a_difference_within_float32_rounding_is_a_tie(gap, tie):
    case = edge_case_batch(vocab=40, window=0, batch=1, seed=0, dtype="float32", needs_probs=False)
    case |= {"temperature": np.zeros(1, np.float32), "bitmask": np.full_like(case["bitmask"], -1)}
    case["logits"] = np.zeros_like(case["logits"])
    case["logits"][0, 0, [3, 7]] = 5, 5 + gap
    assert reference_verify(case)[0].tolist() == [[7]]
    assert is_tie(case, np.array([3]), reference_verify) == tie
    assert not is_tie(case, np.array([4]), reference_verify)


@pytest.mark.parametrize("cache", ["linear", "paged", "paged in steps"])
@pytest.mark.parametrize("dtype", list(Dtype)[1:])
def test_the_float32_reference_has_the_half_precision_weights(tmp_path, dtype, cache):
    """The widened graphs, on a CPU that could not run bfloat16, equal a float32 export of the weights they store."""
    write_checkpoint(tmp_path, Family.QWEN3, Size.TINY, dtype=dtype)
    checkpoint = Checkpoint.open(tmp_path)
    spec = ModelSpec.from_hf(checkpoint.config)
    plan = DecodePlan.within(Limits(batch=3, length=95, capacity=100, num_draft_tokens=4, prefill_chunk=16), spec.vocab)
    logits = []
    for compute, kind in (("float32", "linear"), (dtype.value, cache)):
        path, lowering = tmp_path / f"{compute}.onnx", "length" if kind == "linear" else "paged"
        model = fused(build_decoder(spec, checkpoint, dtype=compute, capacity=100, lowering=lowering), lowering)
        bindings = spec.contract(capacity=100, dtype=compute, cache=kind.split()[0])
        with torch.inference_mode():
            if kind == "paged in steps":
                fuse_transposed_matmuls(model)
                subgraphs, decoder = cut(model)
                for file, subgraph in subgraphs.items():
                    save_model(subgraph, tmp_path / file)
                call = {"batch": 3, "rows": 100, "tokens": 300}
                engine = open_float32_steps(tmp_path, decoder, bindings, 1, call)
            else:
                save_model(model, path)
                engine = open_float32(path, bindings, 1)
            logits.append(score_at_once(engine, plan))
    assert logits[1].dtype == torch.float32
    torch.testing.assert_close(logits[1], logits[0], atol=2e-5, rtol=0)


def with_digest_of(bundle: Path, name: str) -> None:
    """Let the manifest agree with what the file ``name`` holds now."""
    manifest = Bundle.read(bundle).manifest
    data = (bundle / name).read_bytes()
    files = {**manifest.files, name: File(sha256=hashlib.sha256(data).hexdigest(), size=len(data))}
    (bundle / FILE_NAME).write_text(manifest.model_copy(update={"files": files}).to_json())

"""The engines built from ONNX functions agree with the numpy definition, on the backend itself."""

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.export.model.weightless import build_propose, build_verify
from tandemrt.plugins import functions
from tandemrt.plugins.operators.constants import DOMAIN, Purpose
from tandemrt.plugins.reference import position_noise, sample_draft
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine
from tests.engine.operator_cases import BATCH, case, reference_verify, restricted

SENTINEL = -99
VOCABULARIES = [31, 32, 33, 1000, 2049]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@pytest.fixture(scope="module")
def engines(tmp_path_factory):
    """Engines by kind and contract arguments, each built and opened once."""
    folder, opened = tmp_path_factory.mktemp("engines"), {}

    def engine(kind, vocab, dtype="float32", draft_probs=True, **options):
        key = (kind, vocab, dtype, draft_probs, *options)
        if key not in opened:
            build = {"verify": build_verify, "propose": build_propose}[kind]
            how = {"vocab": vocab, "dtype": dtype, "draft_probs": draft_probs, **options}
            bindings = getattr(contract, kind)(**how)
            path = folder / "-".join(map(str, (*key, "engine.onnx")))
            ir.save(build(**how), path)
            opened[key] = OnnxRuntimeEngine.open(path, bindings, device="cpu", threads=1)
        return opened[key]

    return engine


def run(engine, tensors, **outputs):
    bound = {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in tensors.items()}
    dtype = DTYPES[engine.contract["logits"].dtype]
    bound["logits"] = bound["logits"].to(dtype)
    written = {name: torch.full(shape, SENTINEL, dtype=kind) for name, (shape, kind) in outputs.items()}
    engine.bind(bound | written).run()
    return {name: tensor.numpy() for name, tensor in written.items()}


def run_verify(engine, tensors):
    shape = tensors["logits"].shape[:2]
    out = run(engine, tensors, tokens=(shape, torch.int64), count=(shape[:1], torch.int64))
    return out["tokens"], out["count"]


def rounded(tensors, dtype):
    logits = torch.from_numpy(tensors["logits"]).to(DTYPES[dtype]).float().numpy()
    return tensors | {"logits": logits}


def without(tensors, *names):
    return {name: values for name, values in tensors.items() if name not in names}


@pytest.mark.parametrize("draft_probs", [True, False])
@pytest.mark.parametrize("window", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_verification_equals_its_definition(engines, vocab, window, draft_probs):
    """Mixed rules, filters, dead rows, ragged drafts, per-request seeds; every output element is written."""
    tensors = case(vocab, window)
    if not draft_probs:
        tensors = without(tensors, "draft_probs")
    tokens, count = run_verify(engines("verify", vocab, draft_probs=draft_probs), tensors)
    expected_tokens, expected_count = reference_verify(tensors)
    np.testing.assert_array_equal(tokens, expected_tokens)
    np.testing.assert_array_equal(count, expected_count)


def test_the_cases_above_reach_every_count():
    counts = np.concatenate([reference_verify(case(vocab, 4))[1] for vocab in VOCABULARIES])
    assert set(counts) == {0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_logits_are_widened_first(engines, dtype):
    tensors = rounded(case(1000, 3), dtype)
    tokens, _ = run_verify(engines("verify", 1000, dtype), tensors)
    np.testing.assert_array_equal(tokens, reference_verify(tensors)[0])


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0},
        {"temperature": 0.8, "rule": 0},
        {"temperature": 0.8, "rule": 1},
        dict.fromkeys(FILTERS, 0),
        *({other: 0 for other in FILTERS if other != name} for name in FILTERS),
        {"min_p": 1, "temperature": 0.8},
        {"bitmask": -1},
        {"bitmask": 0},
    ],
    ids=str,
)
def test_each_shortcut_of_the_graph_equals_the_definition(engines, changes):
    """A batch that is all greedy, of one rule, without one of the filters, or without a mask takes its own branch."""
    tensors = case(33, 3)
    for name, value in changes.items():
        tensors[name] = np.full_like(tensors[name], value)
    tokens, count = run_verify(engines("verify", 33), tensors)
    np.testing.assert_array_equal(tokens, reference_verify(tensors)[0])
    np.testing.assert_array_equal(count, reference_verify(tensors)[1])


def test_requests_do_not_see_each_other(engines):
    """Regressions S5 and S6: any slot and any batch mates, greedy, coupled and rejection mixed."""
    tensors, engine = case(33, 3), engines("verify", 33)
    tokens, _ = run_verify(engine, tensors)
    order = np.random.default_rng(1).permutation(len(tokens))
    np.testing.assert_array_equal(run_verify(engine, {n: v[order] for n, v in tensors.items()})[0], tokens[order])
    for i in range(len(tokens)):
        alone, _ = run_verify(engine, {name: values[i : i + 1] for name, values in tensors.items()})
        np.testing.assert_array_equal(alone[0], tokens[i])


def test_rows_after_the_draft_are_not_read(engines):
    tensors = case(32, 4)
    expected = run_verify(engines("verify", 32), tensors)
    for request, length in enumerate(tensors["draft_len"]):
        tensors["logits"][request, length + 1 :] = np.nan
        tensors["draft_probs"][request, length:] = np.nan
        tensors["draft_tokens"][request, length:] = -5
    for mine, theirs in zip(run_verify(engines("verify", 32), tensors), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_drafting_equals_its_definition(engines, vocab):
    tensors = without(case(vocab, 0), "bitmask", "draft_tokens", "draft_len", "draft_probs")
    outputs = {"token": ((BATCH,), torch.int64), "probs": ((BATCH, vocab), torch.float32)}
    engine = engines("propose", vocab)
    out = run(
        engine,
        tensors,
        **{
            b.name.removeprefix("draft_") if b.name == "x" else b.name: outputs[b.name.removeprefix("draft_")]
            for b in engine.contract.outputs
        },
    )
    token, probs = sample_draft(**tensors)
    np.testing.assert_array_equal(out["token"], token)
    np.testing.assert_allclose(out["draft_probs"], probs, rtol=2e-7)


def test_drafting_without_probabilities_draws_the_same_tokens(engines):
    tensors = without(case(1000, 0), "bitmask", "draft_tokens", "draft_len", "draft_probs")
    out = run(engines("propose", 1000, "float16", draft_probs=False), tensors, token=((BATCH,), torch.int64))
    np.testing.assert_array_equal(out["token"], sample_draft(**rounded(tensors, "float16"))[0])


@pytest.mark.parametrize("draft_probs", [True, False])
@pytest.mark.parametrize("known", [1, 8, 33, 700])
def test_a_reduced_vocabulary_draws_as_the_full_one_with_the_rest_masked(engines, known, draft_probs):
    """The noise is that of the target's ids, and of equal logits the first is taken: the tokens are the same."""
    whole = without(case(1000, 0, batch=200), "bitmask", "draft_tokens", "draft_len", "draft_probs")
    whole["logits"][:60] = np.round(whole["logits"][:60])
    part, barred = restricted(whole, known)
    probs = {"draft_probs": ((200, known), torch.float32)} if draft_probs else {}
    engine = engines("propose", known, draft_probs=draft_probs, target_ids=True)
    out = run(engine, part, token=((200,), torch.int64), **probs)
    token, probs = sample_draft(**barred)
    mine, own = sample_draft(**part)
    np.testing.assert_array_equal(out["token"], token)
    np.testing.assert_array_equal(mine, token)
    np.testing.assert_allclose(own, probs[:, part["target_ids"]], rtol=2e-7)
    if draft_probs:
        np.testing.assert_allclose(out["draft_probs"], own, rtol=2e-7)


def test_verification_accepts_the_probabilities_that_drafting_returned(engines):
    """Regression S9 across engines: equal logits give equal bits of p and q, so nothing is rejected."""
    tensors = case(1000, 1, batch=200) | {"temperature": np.full(200, 0.9, np.float32), "rule": np.ones(200, np.int64)}
    tensors |= {"logits": np.random.default_rng(3).normal(size=(200, 2, 1000)).astype(np.float32)}
    tensors |= {"bitmask": np.full_like(tensors["bitmask"], -1), "draft_len": np.ones(200, np.int64)}
    drafting = without(tensors, "bitmask", "draft_tokens", "draft_len", "draft_probs") | {
        "logits": tensors["logits"][:, :1]
    }
    out = run(engines("propose", 1000), drafting, token=((200,), torch.int64), draft_probs=((200, 1000), torch.float32))
    tensors |= {"draft_tokens": out["token"][:, None], "draft_probs": out["draft_probs"][:, None]}
    assert (run_verify(engines("verify", 1000), tensors)[1] == 2).all()


def test_the_noise_equals_its_definition(tmp_path):
    """Bits decide the noise: float64 logarithms may differ in their last place, which float32 hides almost always."""
    seeds = np.array([0, -1, 2**63 - 1, 12345], np.int64)
    positions, purposes = np.array([0, 2**40, 7, 2**62], np.int64), np.array([*Purpose], np.int64)
    keys = [ir.val(name, dtype=ir.DataType.INT64, shape=["batch"]) for name in ("seed", "position", "purpose")]
    vocab, noise = (
        ir.val("vocab", dtype=ir.DataType.INT64, shape=[1]),
        ir.val("noise", dtype=ir.DataType.FLOAT, shape=["batch", None]),
    )
    node = ir.node("position_noise", [*keys, vocab], domain=DOMAIN, outputs=[noise])
    graph = ir.Graph(
        [*keys, vocab], [noise], nodes=[node], name="noise", opset_imports={"": functions.OPSET, DOMAIN: 1}
    )
    ir.save(ir.Model(graph, ir_version=11, functions=[functions.position_noise()]), tmp_path / "noise.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "noise.onnx", providers=["CPUExecutionProvider"])
    feeds = {"seed": seeds, "position": positions, "purpose": purposes, "vocab": np.array([2049])}
    expected = position_noise(seeds, positions, purposes, 2049)
    np.testing.assert_array_max_ulp(session.run(None, feeds)[0], expected, maxulp=1)


@pytest.mark.parametrize("draft_probs", [True, False])
@pytest.mark.parametrize("build", [build_verify, build_propose])
def test_the_models_are_standard_onnx_that_carries_its_functions(build, draft_probs):
    model = ir.to_proto(build(vocab=100, dtype="float16", draft_probs=draft_probs))
    onnx.checker.check_model(model, full_check=True)
    bodies = {function.name for function in model.functions}
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    assert {node.op_type for node in nodes if node.domain == DOMAIN} <= bodies
    assert {node.domain for node in nodes} == {"", DOMAIN}
    assert len(model.SerializeToString()) < 100_000

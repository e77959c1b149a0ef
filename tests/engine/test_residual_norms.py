"""The pass that fuses a residual add and the following norm into one operator."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from tandemrt.engines.contract.contract import Binding
from tandemrt.export.graph.builder import LIBRARY, GraphBuilder
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.passes.residual_norms import (
    fuse_lone_norms,
    fuse_norms_of_sums,
    fuse_residual_norms,
    use_residual_norm_kernel,
)
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.constants import DOMAIN
from tests.engine.decoding import fused, make_checkpoint

WIDTH, EPSILON = 6, 1e-3
Values = dict[str, ir.Value]
KERNEL = (DOMAIN, "residual_norm")
FUSED, ADD, NORM = (LIBRARY, "SkipSimplifiedLayerNormalization"), ("", "Add"), ("", "RMSNormalization")


def graph(write: Callable[[GraphBuilder, ir.Value, ir.Value], Values]) -> ir.Model:
    """The graph of two inputs, [batch, query, WIDTH], whose outputs ``write`` gives by name."""
    b = GraphBuilder("g")
    skip, x = (b.input(Binding(name, "float32", ("batch", "query", WIDTH))) for name in ("skip", "x"))
    for name, value in write(b, skip, x).items():
        b.output(Binding(name, "float32", ("batch", "query", WIDTH)), value)
    return b.model()


def vector(b: GraphBuilder, seed: int) -> ir.Value:
    return b.constant(np.random.default_rng(seed).normal(size=WIDTH), "float32")


def norm(b: GraphBuilder, x: ir.Value, **attributes: int) -> ir.Value:
    return b.op("RMSNormalization", x, vector(b, 1), epsilon=EPSILON, **attributes)


def operators(model: ir.Model) -> list[tuple[str, str]]:
    return [(node.domain, node.op_type) for node in model.graph]


def run(model: ir.Model) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    data = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    rng = np.random.default_rng(0)
    return list(session.run(None, {name: rng.normal(size=(2, 3, WIDTH)).astype(np.float32) for name in ("skip", "x")}))


def plain(b: GraphBuilder, skip: ir.Value, x: ir.Value) -> Values:
    total = b.op("Add", skip, x)
    normed = norm(b, total)
    return {"normed": normed, "further": b.op("Neg", total)}


def biased(b: GraphBuilder, skip: ir.Value, x: ir.Value) -> Values:
    total = b.op("Add", skip, b.op("Add", x, vector(b, 2)))
    normed = norm(b, total)
    return {"normed": normed, "total": total}


@pytest.mark.parametrize("write", [plain, biased])
def test_a_norm_of_a_sum_is_one_operator_that_gives_both(write: Callable[..., Values]) -> None:
    model = graph(write)
    expected, names = run(model), [output.name for output in model.graph.outputs]
    fuse_residual_norms(model)
    assert operators(model) == [FUSED, *([("", "Neg")] if write is plain else [])]
    assert [output.name for output in model.graph.outputs] == names
    for actual, value in zip(run(model), expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-6)


def test_a_bias_whose_sum_has_another_reader_stays_a_sum() -> None:
    def write(b: GraphBuilder, skip: ir.Value, x: ir.Value) -> Values:
        shifted = b.op("Add", x, vector(b, 2))
        return {"normed": norm(b, b.op("Add", skip, shifted)), "shifted": b.op("Neg", shifted)}

    model = graph(write)
    expected = run(model)
    fuse_residual_norms(model)
    assert operators(model) == [ADD, FUSED, ("", "Neg")]
    for actual, value in zip(run(model), expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-6)


def test_a_sum_that_is_read_in_front_of_its_norm_stays() -> None:
    def write(b: GraphBuilder, skip: ir.Value, x: ir.Value) -> Values:
        total = b.op("Add", skip, x)
        early = b.op("Neg", total)
        return {"early": early, "normed": norm(b, total)}

    model = graph(write)
    fuse_residual_norms(model)
    assert operators(model) == [ADD, ("", "Neg"), NORM]


def test_a_sum_that_broadcasts_and_a_norm_over_more_than_the_last_dimension_stay() -> None:
    def broadcast(b: GraphBuilder, skip: ir.Value, x: ir.Value) -> Values:
        return {"normed": norm(b, b.op("Add", skip, vector(b, 2))), "x": b.op("Neg", x)}

    def wider(b: GraphBuilder, skip: ir.Value, x: ir.Value) -> Values:
        return {"normed": norm(b, b.op("Add", skip, x), axis=-2)}

    for write in (broadcast, wider):
        model = graph(write)
        before = operators(model)
        fuse_residual_norms(model)
        assert operators(model) == before


@pytest.mark.parametrize("lowering", ["grouped", "paged"])
def test_of_a_decoders_norms_only_the_first_is_none_of_a_sum(lowering: Lowering, tmp_path: Path) -> None:
    make_checkpoint("llama tied", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = ModelSpec.from_hf(checkpoint.config)
    types = operators(fused(build_decoder(spec, checkpoint, dtype="float32", capacity=64, lowering=lowering), lowering))
    counts = types.count(NORM), types.count(FUSED), types.count(KERNEL)
    # On a GPU the first norm is one of its double.
    assert counts == ((1, 0, 2 * spec.layers) if lowering == "grouped" else (0, 2 * spec.layers + 1, 0))


@pytest.mark.parametrize(
    ("dtype", "bias", "replaced"), [("float32", False, 1), ("float32", True, 0), ("float16", False, 0)]
)
def test_a_kernel_computes_fused_norms_in_float32_without_a_bias(dtype: str, bias: bool, replaced: int) -> None:
    b = GraphBuilder("g")
    skip, x = (b.input(Binding(name, dtype, ("batch", "query", WIDTH))) for name in ("skip", "x"))
    vectors = [b.constant(np.random.default_rng(seed).normal(size=WIDTH), dtype) for seed in (1, 2)]
    total = b.op("Add", skip, b.op("Add", x, vectors[1]) if bias else x)
    b.output(
        Binding("normed", dtype, ("batch", "query", WIDTH)),
        b.op("RMSNormalization", total, vectors[0], epsilon=EPSILON),
    )
    b.output(Binding("further", dtype, ("batch", "query", WIDTH)), b.op("Neg", total))
    model = b.model()
    assert fuse_residual_norms(model) == 1
    expected = None if dtype == "float16" else run(model)
    assert use_residual_norm_kernel(model) == replaced
    assert operators(model) == [KERNEL if replaced else FUSED, ("", "Neg")]
    if expected is not None:
        for actual, value in zip(run(model), expected, strict=True):
            np.testing.assert_allclose(actual, value, rtol=1e-5, atol=1e-6)


def test_only_norms_of_sums_over_ranks_are_computed_by_our_operator() -> None:
    def write(b: GraphBuilder, skip: ir.Value, x: ir.Value) -> Values:
        total = b.op("Add", skip, b.op("Neg", x))
        normed, other = norm(b, total), b.op("Add", total, x)
        return {"normed": normed, "other": norm(b, other), "sum": other}

    model = graph(write)
    node = model.graph.node(0)
    node.domain, node.op_type = DOMAIN, "all_reduce"
    fuse_norms_of_sums(model)
    fuse_residual_norms(model)
    assert operators(model) == [(DOMAIN, "all_reduce"), (DOMAIN, "residual_norm"), FUSED]


def test_a_norm_by_itself_becomes_one_of_its_double() -> None:
    model = graph(lambda b, skip, x: {"normed": norm(b, x), "other": b.op("Neg", skip)})
    expected = run(model)
    fuse_lone_norms(model)
    assert operators(model) == [FUSED, ("", "Neg")]
    for actual, value in zip(run(model), expected, strict=True):
        np.testing.assert_allclose(actual, value, rtol=1e-6)


def test_a_norm_in_half_precision_stays_because_the_double_might_overflow() -> None:
    b = GraphBuilder("g")
    x = b.input(Binding("x", "float16", ("batch", WIDTH)))
    b.output(
        Binding("y", "float16", ("batch", WIDTH)), b.op("RMSNormalization", x, b.constant([1.0] * WIDTH, "float16"))
    )
    model = b.model()
    fuse_lone_norms(model)
    assert operators(model) == [NORM]

"""The contract of graph passes: what they require, ensure and count."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.validation.errors import InternalError
from tandemrt.export.compile.graph_contract import differences
from tandemrt.export.graph.builder import LIBRARY, GraphBuilder
from tandemrt.export.passes.basic_operators import expand_operators
from tandemrt.export.passes.batch_invariance import make_batch_invariant
from tandemrt.export.passes.deferred_scales import defer_scales
from tandemrt.export.passes.graph_pass import GraphPass, Pipeline, nodes_in_order, values_typed
from tandemrt.plugins.operators.constants import DOMAIN


def add_graph() -> ir.Model:
    """y = RMSNormalization(a + b), a residual norm that no pass has fused."""
    b = GraphBuilder("g")
    one, two = (b.input(Binding(name, "float32", ("tokens", 4))) for name in ("a", "b"))
    weight = b.constant([1.0] * 4, "float32")
    b.output(Binding("y", "float32", ("tokens", 4)), b.op("RMSNormalization", b.op("Add", one, two), weight))
    return b.model()


def test_a_pipeline_returns_the_rewrites_of_each_pass_in_order() -> None:
    passes = tuple(GraphPass(name, lambda _, count=count: count) for name, count in (("one", 3), ("two", 0)))
    assert Pipeline(passes)(add_graph()) == {"one": 3, "two": 0}


def test_a_condition_that_does_not_hold_before_or_after_is_an_error_by_name() -> None:
    def never(_: ir.Model) -> str:
        return "it cannot"

    for when, condition in (("requires", {"requires": (never,)}), ("ensures", {"ensures": (never,)})):
        with pytest.raises(InternalError, match=rf"pass p {when} never of g: it cannot"):
            GraphPass("p", lambda _: 0, **condition)(add_graph())


def test_a_pass_that_changes_the_outputs_of_the_graph_is_an_error() -> None:
    def rename(model: ir.Model) -> int:
        model.graph.outputs[0].name = "z"
        return 1

    with pytest.raises(InternalError, match="pass rename must not change the inputs or outputs of g"):
        GraphPass("rename", rename)(add_graph())


def test_a_pass_that_needs_fused_residual_norms_names_an_unfused_one() -> None:
    with pytest.raises(InternalError, match=r"defer_scales requires no_residual_norm of g: RMSNormalization is left"):
        defer_scales(add_graph())


@pytest.mark.parametrize(
    ("weight_dtype", "bias", "reader", "deferred"),
    [
        ("float16", False, None, 1),
        ("float32", False, None, 0),
        ("float16", True, None, 0),
        ("float16", False, "before", 0),
        ("float16", False, "after", 1),
    ],
)
def test_scales_are_deferred_to_a_norm_whose_operator_has_all_that_the_graph_needs(
    weight_dtype: str, bias: bool, reader: str | None, deferred: int
) -> None:
    """It has one dtype of stream and weight, no bias, and the sum for readers that follow the quantization."""
    b, stream = GraphBuilder("g"), ("float16", ("tokens", 16))
    float8 = b.input(Binding("float8", "float8_e4m3fn", ("tokens", 16)))
    scales = b.input(Binding("scales", "float32", ("tokens", 1)))
    skip = b.input(Binding("skip", *stream))
    operands = b.constant([[0] * 16] * 16, "uint8"), b.constant([1.0] * 16, "float32")
    [update] = b.custom("scaled_matmul", float8, scales, *operands, domain=DOMAIN, outputs=[stream])
    weights = [b.constant([1.0] * 16, dtype) for dtype in (weight_dtype, *["float16"] * bias)]
    normed, total = b.custom(
        "SkipSimplifiedLayerNormalization", update, skip, *weights, domain=LIBRARY, outputs=[stream, None, None, stream]
    )
    if reader == "before":
        total = b.op("Neg", total)
    outputs = [("float8_e4m3fn", ("tokens", 16)), ("float32", ("tokens", 1))]
    quantized, token_scales = b.custom("quantize_tokens", normed, domain=DOMAIN, outputs=outputs)
    if reader == "after":
        total = b.op("Neg", total)
    b.output(Binding("quantized", *outputs[0]), quantized)
    b.output(Binding("token_scales", *outputs[1]), token_scales)
    b.output(Binding("total", *stream), total)
    assert defer_scales(b.model()) == deferred


def test_a_node_before_the_one_it_reads_and_a_value_without_a_shape_are_found() -> None:
    model = add_graph()
    assert nodes_in_order(model) is None
    assert values_typed(model) is None
    first, last = model.graph
    model.graph.remove(first)
    model.graph.insert_after(last, first)
    assert "RMSNormalization reads Add before" in str(nodes_in_order(model))
    first.outputs[0].shape = None
    assert values_typed(model) == "Add has no dtype or no shape"


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_sum_of_a_few_numbers_becomes_additions_of_all(count: int) -> None:
    b = GraphBuilder("g")
    x = b.input(Binding("x", "float32", ("tokens", count)))
    b.output(Binding("y", "float32", ("tokens", 1)), b.op("ReduceSum", x, b.constant([-1]), keepdims=1))
    model = b.model()
    assert make_batch_invariant(model) == 1
    assert "ReduceSum" not in {node.op_type for node in model.graph}
    rows = np.arange(2 * count, dtype=np.float32).reshape(2, count)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    [sums] = session.run(None, {"x": rows})
    assert sums.tolist() == rows.sum(1, keepdims=True).tolist()


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_gelu_of_basic_operators_has_the_dtype_of_its_input(dtype: str, approximate: str) -> None:
    b = GraphBuilder("g")
    x = b.input(Binding("x", dtype, ("tokens", 4)))
    b.output(Binding("y", dtype, ("tokens", 4)), b.op("Gelu", x, approximate=approximate))
    model = b.model()
    assert expand_operators(model) == 1
    values = np.linspace(-3, 3, 8, dtype=dtype).reshape(2, 4)
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    [result] = session.run(None, {"x": values})
    expected = torch.nn.functional.gelu(torch.tensor(values, dtype=torch.float32), approximate=approximate)
    assert result.dtype == dtype
    np.testing.assert_allclose(result.astype(np.float32), expected.numpy(), atol=1e-6 if dtype == "float32" else 2e-3)


def test_a_graph_file_is_compared_with_inputs_and_outputs_of_its_contract(tmp_path: Path) -> None:
    graph = add_graph()
    ir.save(graph, tmp_path / "g.onnx")
    one, two, y = (Binding(name, "float32", ("tokens", 4)) for name in ("a", "b", "y"))
    assert differences(tmp_path / "g.onnx", Contract((one, two), (y,))) == []
    for inputs, outputs in (
        ((one,), (y,)),
        ((one, two), (replace(y, dtype="float16"),)),
        ((one, two), (y, replace(y, name="z"))),
        ((one, replace(two, shape=("tokens", 5))), (y,)),
    ):
        assert len(differences(tmp_path / "g.onnx", Contract(inputs, outputs))) == 1

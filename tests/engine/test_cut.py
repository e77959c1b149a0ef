"""Cutting a graph at the operators of the project: the nodes of each subgraph, and the values between them."""

import numpy as np
import onnx_ir as ir
import pytest

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.decoder import Operator, Subgraph
from tandemrt.engines.validation.errors import InternalError
from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.passes.cut import cut
from tandemrt.export.passes.transposed_matmuls import fuse_transposed_matmuls
from tandemrt.plugins.operators.constants import DOMAIN

WIDTH = 8


def graph() -> tuple[GraphBuilder, ir.Value]:
    b = GraphBuilder("sample")
    return b, b.input(Binding("x", "float32", ("batch", "query", 2 * WIDTH)))


def gate(b: GraphBuilder, x: ir.Value, name: str, width: int = WIDTH) -> ir.Value:
    [gated] = b.custom("swiglu", x, domain=DOMAIN, outputs=[("float32", ("batch", "query", width))])
    gated.name = name
    return gated


def close(b: GraphBuilder, value: ir.Value, width: int = WIDTH) -> ir.Model:
    b.output(Binding("y", "float32", ("batch", "query", width)), value)
    return b.model()


def operations(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def test_operators_that_follow_one_another_have_no_subgraph_between_them() -> None:
    b, x = graph()
    gated = gate(b, gate(b, b.op("Neg", x), "a"), "b", WIDTH // 2)
    files, decoder = cut(close(b, b.op("Abs", gated), WIDTH // 2))
    assert [step.outputs for step in decoder.steps] == [("Neg",), ("a",), ("b",), ("y",)]
    assert [type(step) for step in decoder.steps] == [Subgraph, Operator, Operator, Subgraph]
    assert {file: operations(model) for file, model in files.items()} == {
        "subgraph.00.onnx": ["Neg"],
        "subgraph.01.onnx": ["Abs"],
    }
    assert decoder.constants is None


def test_an_operator_may_read_an_input_and_make_the_output() -> None:
    b, x = graph()
    files, decoder = cut(close(b, gate(b, x, "y")))
    assert not files
    assert not decoder.values
    assert [(step.inputs, step.outputs) for step in decoder.steps] == [(("x",), ("y",))]


def test_a_node_stands_in_the_subgraph_of_the_first_step_that_needs_it() -> None:
    """Neg could run before the operator; its result would have to be kept for nothing."""
    b, x = graph()
    gated = gate(b, b.op("Abs", x), "a")
    late = b.op("Slice", b.op("Neg", x), b.constant([0]), b.constant([WIDTH]), b.constant([2]))
    files, decoder = cut(close(b, b.op("Add", gated, late)), "target")
    assert {file: operations(model) for file, model in files.items()} == {
        "target/subgraph.00.onnx": ["Abs"],
        "target/subgraph.01.onnx": ["Neg", "Slice", "Add"],
    }
    assert decoder.subgraphs[1].inputs == ("x", "a")


def test_a_value_of_several_steps_is_computed_for_the_first_and_passed_on_to_the_others() -> None:
    b, x = graph()
    shared = b.op("Neg", x)
    gated = gate(b, b.op("Abs", shared), "a")
    late = b.op("Slice", shared, b.constant([0]), b.constant([WIDTH]), b.constant([2]))
    files, decoder = cut(close(b, b.op("Add", gated, late)), "target")
    assert {file: operations(model) for file, model in files.items()} == {
        "target/subgraph.00.onnx": ["Neg", "Abs"],
        "target/subgraph.01.onnx": ["Slice", "Add"],
    }
    assert [subgraph.outputs for subgraph in decoder.subgraphs] == [("Neg", "Abs"), ("y",)]
    assert decoder.subgraphs[1].inputs == ("Neg", "a")


def test_a_node_without_inputs_is_in_every_subgraph_that_reads_it_and_is_never_passed_on() -> None:
    b, x = graph()
    weight = b.op("Neg", b.constant(np.ones(2 * WIDTH), "float32"))
    gated = gate(b, b.op("Add", x, weight), "a")
    both = b.op("Concat", gated, gated, axis=2)
    files, decoder = cut(close(b, b.op("Mul", both, weight), 2 * WIDTH))
    assert [sorted(operations(model)) for model in files.values()] == [["Add", "Neg"], ["Concat", "Mul", "Neg"]]
    assert [value.name for value in decoder.values] == ["Add", "a"]


def test_constants_that_operators_read_are_a_subgraph_without_inputs() -> None:
    """One that is stored, and one that is computed."""
    b, x = graph()
    stored, table = b.constant(np.arange(WIDTH), "float32"), b.op("Cos", b.constant(np.ones((4, WIDTH)), "float32"))
    shape = ("blocks", 1, 64, 2 * WIDTH)
    caches = [b.input(Binding(name, "float32", shape)) for name in ("key", "value")]
    outputs = [("float32", ("batch", "query", WIDTH)), ("float32", shape), ("float32", shape)]
    inputs = [x, *caches, x, x, table, table, stored, stored]
    mixed, *_ = b.custom("window_attention", *inputs, domain=DOMAIN, outputs=outputs)
    files, decoder = cut(close(b, b.op("Neg", mixed)))
    assert decoder.constants == Subgraph(file="constants.onnx", inputs=(), outputs=("Cos", str(stored.name)))
    constants = files["constants.onnx"].graph
    assert [node.op_type for node in constants] == ["Cos", "Identity"]
    assert [value.name for value in constants.outputs] == ["Cos", stored.name]
    assert not constants.inputs


def test_the_graph_that_is_cut_stays_as_it_is() -> None:
    b, x = graph()
    model = close(b, b.op("Neg", gate(b, b.op("Abs", x), "a")))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    cut(model)
    assert ir.to_proto(model).SerializeToString(deterministic=True) == before


def test_a_graph_without_operators_is_refused() -> None:
    b, x = graph()
    with pytest.raises(InternalError, match="graph sample must have nodes of the domain tandemrt to be cut at"):
        cut(close(b, b.op("Neg", x), 2 * WIDTH))


def test_a_value_of_unknown_size_between_subgraphs_is_refused() -> None:
    b, x = graph()
    compressed = b.op("Compress", x, b.input(Binding("keep", "bool", ("batch",))), axis=0)
    with pytest.raises(InternalError, match="must have a dtype and a shape; name its dimensions"):
        cut(close(b, gate(b, compressed, "a")))


def test_matmuls_by_a_transposed_matrix_read_it_as_it_is_stored_and_others_stay() -> None:
    b, x = graph()
    weight = b.constant(np.ones((4, 2 * WIDTH)), "float32")
    turned = b.op("Transpose", weight, perm=[1, 0])
    matmul = b.op("MatMul", x, turned)
    back = b.op("MatMul", matmul, weight)
    kept = b.op("MatMul", back, b.op("Transpose", b.op("Transpose", x, perm=[0, 2, 1]), perm=[0, 1, 2]))
    b.output(Binding("y", "float32", ("batch", "query", "query")), kept)
    model = b.model()
    fuse_transposed_matmuls(model)
    assert operations(model) == ["FusedMatMul", "MatMul", "Transpose", "Transpose", "MatMul"]
    fused = model.graph[0]
    assert [value.name for value in fused.inputs] == ["x", weight.name]
    assert fused.attributes["transB"].value == 1
    assert model.opset_imports["com.microsoft"] == 1

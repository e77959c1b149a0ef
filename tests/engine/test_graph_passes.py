"""The contract of graph passes: what they require, ensure and count."""

import onnx_ir as ir
import pytest

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.validation.errors import InternalError
from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.passes.deferred_scales import defer_scales
from tandemrt.export.passes.graph_pass import GraphPass, Pipeline, nodes_in_order, values_typed


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

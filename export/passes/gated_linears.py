"""Fuse the matmul with an MLP's gates and ups with their product, so that its result need not be written."""

from collections.abc import Iterator

import onnx_ir as ir

from tandemrt.export.passes.graph_pass import graph_pass, nodes_in_order, values_typed
from tandemrt.plugins.functions.gated_linear import gated_linear
from tandemrt.plugins.operators.constants import DOMAIN


def no_gated_linear(model: ir.Model) -> str | None:
    """No linear is left whose only reader is swiglu."""
    return next((f"{matmul.name} is left" for matmul, _ in _matches(model.graph)), None)


@graph_pass(requires=(nodes_in_order, values_typed), ensures=(nodes_in_order, values_typed, no_gated_linear))
def fuse_gated_linears(model: ir.Model) -> int:
    """Replace every ``linear`` that only a ``swiglu`` reads, and that, with one ``gated_linear``."""
    count = 0
    for matmul, swiglu in list(_matches(model.graph)):
        [old] = swiglu.outputs
        outputs = [ir.Value(name=old.name, shape=old.shape, type=old.type)]
        fused = ir.node("gated_linear", matmul.inputs, domain=DOMAIN, outputs=outputs, name=matmul.name)
        ir.convenience.replace_nodes_and_values(model.graph, swiglu, [swiglu, matmul], [fused], [old], outputs)
        count += 1
    if count:
        body = gated_linear()
        model.functions[body.identifier()] = body
    return count


def _matches(graph: ir.Graph) -> Iterator[tuple[ir.Node, ir.Node]]:
    for node in graph:
        value = node.inputs[0] if (node.domain, node.op_type) == (DOMAIN, "swiglu") else None
        matmul = value.producer() if value is not None else None
        if value is None or matmul is None or (matmul.domain, matmul.op_type) != (DOMAIN, "linear"):
            continue
        if len(value.uses()) == 1 and not value.is_graph_output():
            yield matmul, node

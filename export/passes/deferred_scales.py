"""Fuse float8 scales: the operator after a matmul applies its scales and quantizes the input of the next one."""

from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir

from tandemrt.engines.contract.dtypes import from_onnx
from tandemrt.export.graph.builder import LIBRARY
from tandemrt.export.passes.graph_pass import graph_pass, nodes_in_order, values_typed
from tandemrt.export.passes.residual_norms import no_residual_norm
from tandemrt.plugins.functions import float8, quantized
from tandemrt.plugins.operators.constants import DOMAIN

_Match = tuple[ir.Node, ir.Node]  # a scaled matmul, and the swiglu or norm that reads it


def no_scales_to_defer(model: ir.Model) -> str | None:
    """No scaled matmul whose scales defer_scales would move is left."""
    return next((f"{matmul.name} is left" for _, (matmul, *_) in _matches(model.graph)), None)


@graph_pass(
    requires=(nodes_in_order, values_typed, no_residual_norm),
    ensures=(nodes_in_order, values_typed, no_scales_to_defer),
)
def defer_scales(model: ir.Model) -> int:
    """Replace scaled_matmul, then swiglu or a residual norm, then quantize_tokens, with two operators.

    These are float8_matmul, which applies no scales, and quantized_swiglu or quantized_norm. All remaining values are
    unchanged. A match whose inner values have other readers is not fused.
    """
    order = {node: place for place, node in enumerate(model.graph)}
    count = 0
    for last in list(model.graph):
        match = _match(last, order)
        if match is None:
            continue
        matmul, between = match
        joined = _joined(last, matmul, between)
        raw = _without_scales(matmul)
        joined.replace_input_with(list(joined.inputs).index(matmul.outputs[0]), raw.outputs[0])
        old = [*last.outputs, *between.outputs[3:]]  # output 3 of a norm is the sum, which later nodes read
        ir.convenience.replace_nodes_and_values(
            model.graph, last, [last, between, matmul], [raw, joined], old, list(joined.outputs)
        )
        order[raw] = order[joined] = order[last]
        count += 1
    if count:
        _add_functions(model)
    return count


def _matches(graph: ir.Graph) -> Iterator[tuple[ir.Node, _Match]]:
    order = {node: place for place, node in enumerate(graph)}
    for last in graph:
        match = _match(last, order)
        if match is not None:
            yield last, match


def _match(last: ir.Node, order: Mapping[ir.Node, int]) -> _Match | None:
    return _swiglu_match(last) or _norm_match(last, order)


def _swiglu_match(last: ir.Node) -> _Match | None:
    swiglu = (
        _producer_for_one_reader(last.inputs[0], DOMAIN, "swiglu") if _is(last, DOMAIN, "quantize_tokens") else None
    )
    matmul = _producer_for_one_reader(swiglu.inputs[0], DOMAIN, "scaled_matmul") if swiglu else None
    if swiglu is None or matmul is None:
        return None
    return matmul, swiglu


def _norm_match(last: ir.Node, order: Mapping[ir.Node, int]) -> _Match | None:
    fused = "SkipSimplifiedLayerNormalization"
    norm = _producer_for_one_reader(last.inputs[0], LIBRARY, fused) if _is(last, DOMAIN, "quantize_tokens") else None
    matmul = (
        _producer_for_one_reader(norm.inputs[0], DOMAIN, "scaled_matmul") if norm and len(norm.inputs) == 3 else None
    )
    if norm is None or matmul is None:
        return None
    _, skip, weight = norm.inputs
    total = norm.outputs[3]
    if skip is None or weight is None or weight.dtype != skip.dtype:
        return None
    if any(order[reader] < order[last] for reader in total.consumers()):
        return None
    return matmul, norm


def _joined(last: ir.Node, matmul: ir.Node, between: ir.Node) -> ir.Node:
    """Return the operator that replaces ``between`` and ``last``."""
    scaled = [matmul.outputs[0], matmul.inputs[1], matmul.inputs[3]]
    if between.op_type == "swiglu":
        return _node("quantized_swiglu", [*scaled, *last.inputs[1:]], last.outputs, name=last.name)
    _, skip, weight = between.inputs
    outputs = [*last.outputs, between.outputs[3]]
    attributes = {"epsilon": between.attributes.get_float("epsilon", 1e-5)}
    return _node("quantized_norm", [skip, *scaled, weight, *last.inputs[1:]], outputs, attributes, last.name)


def _without_scales(matmul: ir.Node) -> ir.Node:
    quantized_value, _, weight, _ = matmul.inputs
    raw = _node("float8_matmul", [quantized_value, weight], matmul.outputs, name=matmul.name)
    raw.outputs[0].name = matmul.outputs[0].name
    return raw


def _node(
    operator: str,
    inputs: Sequence[ir.Value | None],
    like: Sequence[ir.Value],
    attributes: Mapping[str, float] | None = None,
    name: str | None = None,
) -> ir.Node:
    outputs = [ir.Value(name=value.name, shape=value.shape, type=value.type) for value in like]
    return ir.node(operator, inputs, attributes or {}, domain=DOMAIN, outputs=outputs, name=name)


def _is(node: ir.Node, domain: str, op_type: str) -> bool:
    return (node.domain, node.op_type) == (domain, op_type)


def _producer_for_one_reader(value: ir.Value | None, domain: str, op_type: str) -> ir.Node | None:
    """Return the producer of ``value`` if it is this operator and ``value`` has one reader and is no graph output."""
    node = value.producer() if value is not None else None
    if value is None or node is None or not _is(node, domain, op_type):
        return None
    return node if len(value.uses()) == 1 and not value.is_graph_output() else None


def _add_functions(model: ir.Model) -> None:
    """Add the function bodies of the operators that the pass inserts."""
    nodes = [node for node in model.graph if node.domain == DOMAIN]
    dtype = next(node.outputs[0].dtype for node in nodes if node.op_type == "float8_matmul")
    static = any(node.op_type == "quantized_norm" and len(node.inputs) > 5 for node in nodes)
    static |= any(node.op_type == "quantized_swiglu" and len(node.inputs) > 3 for node in nodes)
    assert dtype is not None, "every value has a dtype"
    bodies = (
        float8.float8_matmul(from_onnx(int(dtype))),
        quantized.quantized_swiglu(static=static),
        quantized.quantized_norm(static=static),
    )
    for body in bodies:
        model.functions[body.identifier()] = body

"""Between two products in float8 one operator: it applies the scales of the first and rounds for the second."""

import onnx_ir as ir

from tandemrt.engines.dtypes import from_onnx
from tandemrt.export.model.builder import LIBRARY
from tandemrt.plugins.functions import float8, quantized
from tandemrt.plugins.operators import DOMAIN

_Found = tuple[ir.Node, ir.Node, ir.Node]  # a product, what stands behind it, and what takes the latter's place


def defer_scales(model: ir.Model) -> None:
    """Make every scaled_product, swiglu or residual norm, and quantize_tokens in a row two operators, in place.

    These are float8_product, which applies no scales, and quantized_swiglu or quantized_norm. Requires nodes in order,
    residual norms as fuse_residual_norms leaves them, and a dtype and a shape of every value. Leaves a graph of the
    same values, those that are gone aside. A value that is read elsewhere, too, stays, and so does what makes it.
    """
    order = {node: place for place, node in enumerate(model.graph)}
    changed = False
    for last in list(model.graph):
        found = _gated(last) or _normed(last, order)
        if found is None:
            continue
        product, between, joined = found
        raw = _without_scales(product)
        joined.replace_input_with(list(joined.inputs).index(product.outputs[0]), raw.outputs[0])
        old = [*last.outputs, *between.outputs[3:]]  # of a norm the sum, which is read further on
        ir.convenience.replace_nodes_and_values(
            model.graph, last, [last, between, product], [raw, joined], old, list(joined.outputs)
        )
        order[raw] = order[joined] = order[last]
        changed = True
    if changed:
        _add_functions(model)


def _gated(last: ir.Node) -> _Found | None:
    swiglu = _maker(last.inputs[0], DOMAIN, "swiglu") if _is(last, DOMAIN, "quantize_tokens") else None
    product = _maker(swiglu.inputs[0], DOMAIN, "scaled_product") if swiglu else None
    if swiglu is None or product is None:
        return None
    inputs = [product.outputs[0], product.inputs[1], product.inputs[3], *last.inputs[1:]]
    return product, swiglu, _node("quantized_swiglu", inputs, last.outputs, name=last.name)


def _normed(last: ir.Node, order: dict[ir.Node, int]) -> _Found | None:
    fused = "SkipSimplifiedLayerNormalization"
    norm = _maker(last.inputs[0], LIBRARY, fused) if _is(last, DOMAIN, "quantize_tokens") else None
    product = _maker(norm.inputs[0], DOMAIN, "scaled_product") if norm and len(norm.inputs) == 3 else None
    if norm is None or product is None:
        return None
    _, skip, weight = norm.inputs
    total = norm.outputs[3]
    if skip is None or weight is None or weight.dtype != skip.dtype:
        return None
    if any(order[reader] < order[last] for reader in total.consumers()):
        return None
    inputs = [skip, product.outputs[0], product.inputs[1], product.inputs[3], weight, *last.inputs[1:]]
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    return product, norm, _node("quantized_norm", inputs, [*last.outputs, total], {"epsilon": epsilon}, last.name)


def _without_scales(product: ir.Node) -> ir.Node:
    quantized_value, _, weight, _ = product.inputs
    raw = _node("float8_product", [quantized_value, weight], product.outputs, name=product.name)
    raw.outputs[0].name = product.outputs[0].name
    return raw


def _node(
    name_of: str,
    inputs: list[ir.Value | None],
    like: "list[ir.Value] | tuple[ir.Value, ...]",
    attributes: dict[str, float] | None = None,
    name: str | None = None,
) -> ir.Node:
    outputs = [ir.Value(name=value.name, shape=value.shape, type=value.type) for value in like]
    return ir.node(name_of, inputs, attributes or {}, domain=DOMAIN, outputs=outputs, name=name)


def _is(node: ir.Node, domain: str, op_type: str) -> bool:
    return (node.domain, node.op_type) == (domain, op_type)


def _maker(value: ir.Value | None, domain: str, op_type: str) -> ir.Node | None:
    """The node of this kind that makes ``value``, if nobody else reads it."""
    node = value.producer() if value is not None else None
    if value is None or node is None or not _is(node, domain, op_type):
        return None
    return node if len(value.uses()) == 1 and not value.is_graph_output() else None


def _add_functions(model: ir.Model) -> None:
    """The bodies of the operators that this pass puts in."""
    nodes = [node for node in model.graph if node.domain == DOMAIN]
    dtype = next(node.outputs[0].dtype for node in nodes if node.op_type == "float8_product")
    static = any(node.op_type == "quantized_norm" and len(node.inputs) > 5 for node in nodes)
    static |= any(node.op_type == "quantized_swiglu" and len(node.inputs) > 3 for node in nodes)
    assert dtype is not None, "every value has a dtype"
    bodies = (
        float8.float8_product(from_onnx(int(dtype))),
        quantized.quantized_swiglu(static=static),
        quantized.quantized_norm(static=static),
    )
    for body in bodies:
        model.functions[body.identifier()] = body

"""A graph in which a token is rounded the same whatever else is in the call."""

import onnx_ir as ir

from tandemrt.engines.errors import BadRecipe, quoted
from tandemrt.engines.operators import SCHEMAS
from tandemrt.export.model.builder import LIBRARY, dims_of
from tandemrt.export.passes.residual_norms import lone_norm
from tandemrt.plugins.functions.linear import linear
from tandemrt.plugins.operators import DOMAIN

STEP = 8  # what inputs and outputs of ``linear`` must be a multiple of
# What may stay as it is, by domain. Each computes a number of its result from a fixed few of its inputs, whatever their
# shape, or only moves numbers; the residual norm sums up a token in one block.
_ALLOWED = {
    "": frozenset(
        (
            *("Add", "Sub", "Mul", "Div", "Sin", "Cos", "Tanh", "Sigmoid", "Gelu", "Relu", "Where", "Cast", "Identity"),
            *("Constant", "Shape", "Range", "Expand", "Reshape", "Squeeze", "Unsqueeze", "Transpose"),
            *("Concat", "Split", "Slice", "Gather"),
        )
    ),
    LIBRARY: frozenset(("SkipSimplifiedLayerNormalization",)),
}


def make_batch_invariant(model: ir.Model) -> None:
    """Change the graph in place so that no token's result depends on the number of others; the values stay the same.

    Every MatMul by the transpose of a stored weight becomes the operator ``linear``, and every RMSNormalization that of
    a residual sum with zeros, whose kernel has a block of threads per token, as no other norm of onnxruntime has.
    Requires residual norms as fuse_residual_norms leaves them, nodes in order, and a dtype and a shape of every value.
    Raises BadRecipe if something is left that may round a token otherwise among others.
    """
    for node in list(model.graph):
        weight = _transposed(node)
        if weight is not None:
            _require_step(node, weight)
            _replace(model, node, ir.node("linear", [node.inputs[0], weight], domain=DOMAIN, outputs=_copies(node)))
        elif normed := lone_norm(node):
            _replace(model, node, *_residual_norm(node, *normed))
    model.graph.opset_imports.setdefault(LIBRARY, 1)
    if any(node.op_type == "linear" for node in model.graph):
        body = linear()
        model.functions[body.identifier()] = body
    if left := [node for node in model.graph if not _is_batch_invariant(node)]:
        raise BadRecipe(
            f"backend.batch_invariant has no {left[0].op_type}, which {quoted(str(left[0].name))} of the target is; "
            "drop it, or choose weights in bfloat16, float16 or float8 without experts"
        )


def _transposed(node: ir.Node) -> ir.Value | None:
    """The weight [width, inner] by whose transpose ``node`` multiplies, if it does."""
    turned = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
    return turned.inputs[0] if turned is not None and turned.op_type == "Transpose" else None


def _require_step(node: ir.Node, weight: ir.Value) -> None:
    if any(not isinstance(dim, int) or dim % STEP for dim in dims_of(weight)):
        raise BadRecipe(
            f"backend.batch_invariant needs inputs and outputs of products in multiples of {STEP}; "
            f"{quoted(str(node.name))} has {list(dims_of(weight))}; drop it"
        )


def _copies(node: ir.Node) -> list[ir.Value]:
    return [ir.Value(name=value.name, shape=value.shape, type=value.type) for value in node.outputs]


def _residual_norm(norm: ir.Node, x: ir.Value, weight: ir.Value) -> tuple[ir.Node, ir.Node]:
    zeros = ir.node("Sub", [x, x], outputs=[ir.Value(name=f"{norm.name}/zeros", shape=x.shape, type=x.type)])
    attributes = {"epsilon": norm.attributes.get_float("epsilon", 1e-5)}
    operator = "SkipSimplifiedLayerNormalization"
    fused = ir.node(operator, [x, zeros.outputs[0], weight], attributes, domain=LIBRARY, outputs=_copies(norm))
    return zeros, fused


def _replace(model: ir.Model, old: ir.Node, *new: ir.Node) -> None:
    new[-1].name = old.name
    turned = old.inputs[1].producer() if old.inputs[1] is not None else None
    ir.convenience.replace_nodes_and_values(model.graph, old, [old], list(new), old.outputs, new[-1].outputs)
    if turned is not None and turned.op_type == "Transpose" and not turned.outputs[0].uses():
        model.graph.remove(turned, safe=True)


def _is_batch_invariant(node: ir.Node) -> bool:
    return (
        SCHEMAS[node.op_type].batch_invariant
        if node.domain == DOMAIN
        else node.op_type in _ALLOWED.get(node.domain, ())
    )

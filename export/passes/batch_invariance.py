"""Batch invariance: the bits of a token do not depend on the other tokens of the call (docs/invariance.md)."""

import onnx_ir as ir

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.engines.validation.errors import BadRecipe, quoted
from tandemrt.export.graph.builder import LIBRARY, dims_of
from tandemrt.export.passes.graph_pass import graph_pass, nodes_in_order, values_typed
from tandemrt.export.passes.residual_norms import lone_norm, no_residual_norm
from tandemrt.plugins.functions.linear import linear
from tandemrt.plugins.operators.constants import DOMAIN


class NotBatchInvariant(BadRecipe):
    """A graph has an operator without a batch-invariant implementation. ``reason`` names it."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"backend.batch_invariant = true is not possible: {reason}; drop it, or choose another checkpoint"
        )
        self.reason = reason


STEP = 8  # inputs and outputs of ``linear`` must be a multiple of this
# Batch-invariant standard operators, by domain. Each computes an output element from a fixed number of input elements,
# or only moves elements; the residual norm sums each token in one thread block.
_ALLOWED = {
    "": frozenset(
        (
            *("Add", "Sub", "Mul", "Div", "Neg", "Exp", "Sin", "Cos", "Tanh", "Sigmoid", "Gelu", "Relu"),
            *("Where", "Cast", "Identity"),
            *("Constant", "Shape", "Range", "Expand", "Reshape", "Squeeze", "Unsqueeze", "Transpose"),
            *("Concat", "Split", "Slice", "Gather"),
        )
    ),
    LIBRARY: frozenset(("SkipSimplifiedLayerNormalization",)),
}


@graph_pass(requires=(nodes_in_order, values_typed, no_residual_norm), ensures=(nodes_in_order, values_typed))
def make_batch_invariant(model: ir.Model) -> int:
    """Replace every operator whose result for a token could depend on the number of tokens.

    Every MatMul by the transpose of a stored weight becomes the operator ``linear``. Every RMSNormalization becomes the
    norm of a residual sum with zeros, the only norm of onnxruntime whose kernel uses one thread block per token.
    Raises NotBatchInvariant for an operator that is not known to be batch-invariant.
    """
    count = 0
    for node in list(model.graph):
        weight = _transposed(node)
        if weight is not None:
            _require_step(node, weight)
            _replace(model, node, ir.node("linear", [node.inputs[0], weight], domain=DOMAIN, outputs=_copies(node)))
        elif normed := lone_norm(node):
            _replace(model, node, *_residual_norm(node, *normed))
        else:
            continue
        count += 1
    model.graph.opset_imports.setdefault(LIBRARY, 1)
    if any(node.op_type == "linear" for node in model.graph):
        body = linear()
        model.functions[body.identifier()] = body
    if left := [node for node in model.graph if not _is_batch_invariant(node)]:
        raise NotBatchInvariant(
            f"{left[0].op_type}, the operator of {quoted(str(left[0].name))}, has no batch-invariant implementation"
        )
    return count


def _transposed(node: ir.Node) -> ir.Value | None:
    """Return the weight [width, inner] if ``node`` is a MatMul by a transposed weight, else None."""
    transpose = node.inputs[1].producer() if node.op_type == "MatMul" and node.inputs[1] is not None else None
    return transpose.inputs[0] if transpose is not None and transpose.op_type == "Transpose" else None


def _require_step(node: ir.Node, weight: ir.Value) -> None:
    if any(not isinstance(dim, int) or dim % STEP for dim in dims_of(weight)):
        raise NotBatchInvariant(
            f"inputs and outputs of matmuls must be multiples of {STEP}; {quoted(str(node.name))} has "
            f"{list(dims_of(weight))}"
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
    transpose = old.inputs[1].producer() if old.inputs[1] is not None else None
    ir.convenience.replace_nodes_and_values(model.graph, old, [old], list(new), old.outputs, new[-1].outputs)
    if transpose is not None and transpose.op_type == "Transpose" and not transpose.outputs[0].uses():
        model.graph.remove(transpose, safe=True)


def _is_batch_invariant(node: ir.Node) -> bool:
    return (
        SCHEMAS[node.op_type].batch_invariant
        if node.domain == DOMAIN
        else node.op_type in _ALLOWED.get(node.domain, ())
    )

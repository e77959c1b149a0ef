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


_PROMPT_ROWS = "prompt_rows"  # of a packed call (contract.packed)
STEP = 8  # inputs and outputs of ``linear`` must be a multiple of this
# Batch-invariant standard operators, by domain. Each computes an output element from a fixed number of input elements,
# or only moves elements; the residual norm sums each token in one thread block.
_ALLOWED = {
    "": frozenset(
        (
            *("Add", "Sub", "Mul", "Div", "Neg", "Exp", "Sin", "Cos", "Tanh", "Sigmoid", "Gelu", "Relu"),
            *("Clip", "Min", "Softplus", "RotaryEmbedding", "Log", "Max", "Greater", "Where", "Cast", "Identity"),
            *("Constant", "Shape", "Range", "Expand", "Reshape", "Squeeze", "Unsqueeze", "Transpose"),
            *("Concat", "Split", "Slice", "Gather", "GatherElements", "ScatterElements"),
        )
    ),
    LIBRARY: frozenset(("SkipSimplifiedLayerNormalization",)),
}
_MOST_RANKED = 256  # numbers of a row from which TopK takes, of equal ones, the first, whatever kernel onnxruntime runs
_MOST_SUMMED = 32  # numbers of a row whose sum becomes additions


@graph_pass(requires=(nodes_in_order, values_typed, no_residual_norm), ensures=(nodes_in_order, values_typed))
def make_batch_invariant(model: ir.Model) -> int:
    """Replace every operator whose result for a token could depend on the number of tokens.

    Every MatMul by the transpose of a stored weight becomes the operator ``linear``. Every RMSNormalization becomes the
    norm of a residual sum with zeros, the only norm of onnxruntime whose kernel uses one thread block per token.
    One of 1, 2 or 4 outputs, such as the gate of a shared expert, has 8 with repeated rows of the weight.
    The sum of a few numbers per token becomes additions in their order.
    Operators that compute the rows of prompts otherwise than those of windows get the call's ``prompt_rows``.
    Raises NotBatchInvariant for an operator that is not known to be batch-invariant.
    """
    count = 0
    for node in list(model.graph):
        weight = _transposed(node)
        if weight is not None:
            _replace(model, node, *_linear(node, weight))
        elif normed := lone_norm(node):
            _replace(model, node, *_residual_norm(node, *normed))
        elif _sums_few(node):
            _replace(model, node, *_additions(node))
        elif _has_prompts(node):
            _append_prompt_rows(node, next(value for value in model.graph.inputs if value.name == _PROMPT_ROWS))
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
    weight = transpose.inputs[0] if transpose is not None and transpose.op_type == "Transpose" else None
    return weight if weight is not None and len(dims_of(weight)) == 2 else None


def _linear(node: ir.Node, weight: ir.Value) -> tuple[ir.Node, ...]:
    """Return the operator in place of a matmul by ``weight``, after or before what repeats its rows."""
    (width, inner), x = dims_of(weight), node.inputs[0]
    if not isinstance(width, int) or width >= STEP or STEP % width:
        _require_step(node, weight)
        return (ir.node("linear", [x, weight], domain=DOMAIN, outputs=_copies(node)),)

    def value(name: str, *dims: int | str | None, like: ir.Value) -> ir.Value:
        return ir.Value(name=f"{node.name}/{name}", shape=ir.Shape(dims), type=like.type)

    [result], times = node.outputs, STEP // width
    repeated = value("repeated", STEP, inner, like=weight)
    whole = value("whole", *dims_of(result)[:-1], STEP, like=result)
    others = [value(f"part_{number}", *dims_of(result), like=result) for number in range(1, times)]
    _require_step(node, repeated)
    return (
        ir.node("Concat", [weight] * times, {"axis": 0}, outputs=[repeated], name=f"{node.name}/repeat"),
        ir.node("linear", [x, repeated], domain=DOMAIN, outputs=[whole], name=f"{node.name}/linear"),
        ir.node("Split", [whole], {"axis": -1, "num_outputs": times}, outputs=[*_copies(node), *others]),
    )


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


def _sums_few(node: ir.Node) -> bool:
    """Return whether ``node`` sums a known, small number of elements: the last dimension, which it keeps."""
    if node.op_type != "ReduceSum" or node.domain or node.inputs[0] is None or node.inputs[1] is None:
        return False
    axes, count = node.inputs[1].const_value, dims_of(node.inputs[0])[-1]
    last = axes is not None and axes.numpy().tolist() == [-1]
    return last and node.attributes.get_int("keepdims", 1) == 1 and isinstance(count, int) and 1 < count <= _MOST_SUMMED


def _additions(node: ir.Node) -> list[ir.Node]:
    """Return a Split of the last dimension and the additions of its parts, in their order."""
    (x, _), (total,) = node.inputs, node.outputs
    assert x is not None

    def value(name: str) -> ir.Value:
        return ir.Value(name=f"{node.name}/{name}", shape=total.shape, type=total.type)

    count = int(dims_of(x)[-1])
    parts = [value(f"part_{number}") for number in range(count)]
    nodes, partial_sum = [ir.node("Split", [x], {"axis": -1, "num_outputs": count}, outputs=parts)], parts[0]
    for number, part in enumerate(parts[1:], 1):
        outputs = [value(f"sum_{number}")] if number + 1 < count else _copies(node)
        nodes.append(ir.node("Add", [partial_sum, part], outputs=outputs))
        partial_sum = outputs[0]
    return nodes


def _has_prompts(node: ir.Node) -> bool:
    """Return whether ``node`` can compute the rows of prompts otherwise, and its rows are all tokens of a call."""
    takes = node.domain == DOMAIN and _PROMPT_ROWS in SCHEMAS[node.op_type].optional
    return takes and node.inputs[0] is not None and dims_of(node.inputs[0])[0] == "tokens"


def _append_prompt_rows(node: ir.Node, rows: ir.Value) -> None:
    index = [binding.name for binding in SCHEMAS[node.op_type].inputs].index(_PROMPT_ROWS)
    node.resize_inputs(index + 1)
    node.replace_input_with(index, rows)


def _replace(model: ir.Model, old: ir.Node, *new: ir.Node) -> None:
    new[-1].name = old.name
    transpose = old.inputs[1].producer() if old.inputs[1] is not None else None
    ir.convenience.replace_nodes_and_values(
        model.graph, old, [old], list(new), old.outputs, new[-1].outputs[: len(old.outputs)]
    )
    if transpose is not None and transpose.op_type == "Transpose" and not transpose.outputs[0].uses():
        model.graph.remove(transpose, safe=True)


def _is_batch_invariant(node: ir.Node) -> bool:
    if node.domain == DOMAIN:
        return SCHEMAS[node.op_type].batch_invariant
    if node.op_type == "TopK" and node.inputs[0] is not None:
        ranked = dims_of(node.inputs[0])[-1]
        return isinstance(ranked, int) and ranked <= _MOST_RANKED
    return node.op_type in _ALLOWED.get(node.domain, ())

"""A mixture of experts: a router, and behind it an ``If`` for every expert, or one operator of the project."""

from typing import Protocol

import onnx_ir as ir

from tandemrt.export.model.activation import activate, clamped_swiglu
from tandemrt.export.model.builder import GraphBuilder, dims_of
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.block import Experts
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators import DOMAIN


class Mixture(Protocol):
    """[..., hidden] to the same: what the experts give that each token chose, by the weights it gave them.

    ``name`` is what the checkpoint calls the block.
    """

    def __call__(
        self, b: GraphBuilder, x: ir.Value, w: Weights, spec: ModelSpec, experts: Experts, name: str
    ) -> ir.Value: ...


def one_operator(b: GraphBuilder, x: ir.Value, w: Weights, spec: ModelSpec, experts: Experts, name: str) -> ir.Value:
    """The product of the router and the operator ``experts``, for what export/model/support.py lets through.

    All experts of a layer are one weight. Files hold those of an expert one behind the other, or in another order than
    the operator's, so they are joined when the bundle is opened.
    """
    logits = Linear.stored(f"{name}.gate", experts.count)(b, x, w)
    stems, width = [f"{name}.experts.{expert}" for expert in range(experts.count)], experts.intermediate
    both = [f"{stem}.{kind}_proj.weight" for stem in stems for kind in ("gate", "up")]
    gate_up = w.stacked(both, [width] * len(both), (spec.hidden,), name=f"{name}.experts.gate_up")
    out = [f"{stem}.down_proj.weight" for stem in stems]
    down = w.stacked(out, [spec.hidden] * experts.count, (width,), name=f"{name}.experts.down")
    (mixed,) = b.custom(
        *("experts", x, logits, gate_up, down),
        domain=DOMAIN,
        outputs=[(w.dtype, dims_of(x))],
        per_token=experts.per_token,
        normalized=int(experts.normalized),
    )
    return mixed


def branches(b: GraphBuilder, x: ir.Value, w: Weights, spec: ModelSpec, experts: Experts, name: str) -> ir.Value:
    """Standard operators, for [batch, query, hidden]: an ``If`` for every expert that runs it for its tokens.

    Each expert's weights stay where the file holds them and are read only if some token of the call chose it. A token's
    sum has one order, that of the experts, and products round a row the same in any company, so a token has the same
    bits alone and in a window. onnxruntime's ``MoE`` for CPUs has not, and takes all experts as one tensor in an order
    of its own.
    """
    router = Linear.stored(f"{name}.gate", experts.count, bias=experts.biased)
    shares = _routed(b, router(b, x, w), experts, w.dtype)
    # Compared before it is reduced: a row's NaN may not hide what another one chose.
    choices = b.cast(b.op("Greater", shares, b.constant(0, w.dtype)), "int32")
    none = b.constant([[0]] * experts.count, "int32")  # a prompt's last layer has no token
    chosen = b.op("ReduceMax", b.op("Concat", choices, none, axis=1), b.constant([1]), keepdims=0)
    chosen = b.cast(chosen, "bool")
    flat = b.op("Reshape", x, b.constant([-1, spec.hidden]))
    total = b.op("Mul", flat, b.constant(0, w.dtype))
    for expert in range(experts.count):
        total = _added(b, total, flat, shares, chosen, w, spec, experts, expert, name)
    result = b.op("Reshape", total, b.op("Shape", x), allowzero=1)
    result.shape = ir.Shape(dims_of(x))
    return result


def _routed(b: GraphBuilder, logits: ir.Value, experts: Experts, dtype: str) -> ir.Value:
    """[experts, tokens]: the weight that each token gives each expert, 0 if it did not choose it."""
    probabilities = b.op("Softmax", b.cast(logits, "float32"), axis=-1)
    weights, indices = b.ops("TopK", probabilities, b.constant([experts.per_token]), outputs=2, axis=-1)
    if experts.normalized:
        weights = b.op("Div", weights, b.op("ReduceSum", weights, b.constant([-1]), keepdims=1))
    nothing = b.op("Mul", probabilities, b.constant(0, "float32"))
    shares = b.cast(b.op("ScatterElements", nothing, indices, weights, axis=-1), dtype)
    return b.op("Transpose", b.op("Reshape", shares, b.constant([-1, experts.count])), perm=[1, 0])


def _added(
    b: GraphBuilder,
    total: ir.Value,
    flat: ir.Value,
    shares: ir.Value,
    chosen: ir.Value,
    w: Weights,
    spec: ModelSpec,
    experts: Experts,
    expert: int,
    name: str,
) -> ir.Value:
    """``total`` [tokens, hidden] with what one expert gives to the tokens that chose it."""
    stem, index = f"{name}.experts.{expert}", b.constant(expert)
    down = Linear.stored(f"{stem}.down_proj", spec.hidden, bias=experts.biased)

    def run() -> tuple[ir.Value]:
        mine = b.op("Gather", shares, index, axis=0)
        tokens = b.op("Squeeze", b.op("NonZero", mine), b.constant([0]))
        rows = b.op("Unsqueeze", b.op("Gather", flat, tokens), b.constant([0]))  # products take [batch, query, inner]
        given = b.op("Squeeze", down(b, _activated(b, rows, w, spec, experts, stem), w), b.constant([0]))
        places = b.op("Unsqueeze", tokens, b.constant([1]))
        weighted = b.op("Mul", given, b.op("Gather", b.op("Unsqueeze", mine, b.constant([1])), tokens))
        return (b.op("ScatterND", total, places, weighted, reduction="add"),)

    [result] = b.branch(b.op("Gather", chosen, index), run, lambda: (b.op("Identity", total),))
    return result


def _activated(b: GraphBuilder, rows: ir.Value, w: Weights, spec: ModelSpec, experts: Experts, stem: str) -> ir.Value:
    """[1, rows, intermediate]: what stands in front of an expert's last product."""
    width = experts.intermediate
    if experts.joined:
        both = Linear.stored(f"{stem}.gate_up_proj", 2 * width, bias=experts.biased)(b, rows, w)
        pairs = b.op("Reshape", both, b.constant([1, -1, width, 2]))
        gate, up = (b.op("Gather", pairs, b.constant(at), axis=3) for at in (0, 1))
    else:
        gate, up = (
            Linear.stored(f"{stem}.{kind}_proj", width, bias=experts.biased)(b, rows, w) for kind in ("gate", "up")
        )
    if experts.clamped is not None:
        return clamped_swiglu(b, gate, up, experts.clamped, w.dtype)
    return activate(b, gate, up, spec.activation)

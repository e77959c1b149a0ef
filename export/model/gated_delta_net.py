"""Gated delta net: the operator ``gated_delta_net`` (docs/operators.md), on a CPU by onnxruntime's operators."""

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, GraphBuilder, dims_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear, merge_linears
from tandemrt.export.model.norm import normed
from tandemrt.export.model.packed_recurrence import DeltaNetWeights, PackedCall
from tandemrt.export.model.recurrence import (
    Held,
    Recurrence,
    RecurrentCall,
    convolved_by,
    for_each_head,
    silu,
    unit_vectors,
)
from tandemrt.export.read.recurrent_layers import DeltaNet


def gated_delta_net(
    b: GraphBuilder, x: ir.Value, w: Weights, name: str, net: DeltaNet, call: RecurrentCall | PackedCall, held: Held
) -> tuple[ir.Value, Held]:
    """Append a layer (export/model/recurrent.py)."""
    assert held.state is not None
    mixed, gate = _projected(b, x, w, name, net, call)
    weights = _weights(b, w, name, net)
    if isinstance(call, PackedCall):
        out, after = call.delta_net(b, mixed, weights, net, held, w.dtype)
    else:
        ordered, earlier = call.earlier(b, held.recent, w.dtype)
        out, state = call.run(b, _span(b, mixed, earlier, w, weights, net, call), held.state, w.dtype)
        after = Held(call.tokens.store(b, ordered, mixed), state)
    headed = _reshaped(b, out, net.value_heads, net.value_dim)
    scaled = normed(b, headed, w(f"{name}.norm.weight", (net.value_dim,)), w.dtype, net.norm_eps or call.spec.norm_eps)
    # `gate` has the shape of the output.
    return b.op("Mul", _reshaped(b, scaled, net.mixed, dims=len(dims_of(gate))), silu(b, gate)), after


def _projected(
    b: GraphBuilder, x: ir.Value, w: Weights, name: str, net: DeltaNet, call: RecurrentCall | PackedCall
) -> tuple[ir.Value, ir.Value]:
    """Return the inputs of each token, [..., width], and its output gate."""
    values = net.value_heads * net.value_dim
    if net.projections == "by key head":
        qkvz = call.matmul(b, x, w, Linear.stored(f"{name}.in_proj_qkvz", net.channels + values))
        gates = call.matmul(b, x, w, Linear.stored(f"{name}.in_proj_ba", 2 * net.value_heads))
        shared = net.value_heads // net.key_heads
        *qkv, gate = _by_kind(b, qkvz, net.key_heads, [net.key_dim, net.key_dim, *[shared * net.value_dim] * 2])
        update, decay = _by_kind(b, gates, net.key_heads, [shared] * 2)
        return b.op("Concat", *qkv, decay, update, axis=-1), gate
    # In the order of their names, in which they are adjacent in the file.
    widths = {
        "in_proj_a": net.value_heads,
        "in_proj_b": net.value_heads,
        "in_proj_qkv": net.channels,
        "in_proj_z": values,
    }
    stored = widths
    if net.projections == "separate":
        keys = net.key_heads * net.key_dim
        parts = {"q_proj": keys, "k_proj": keys, "v_proj": values}
        stored = {"in_proj_a": net.value_heads, "in_proj_b": net.value_heads, **parts, "in_proj_z": values}
    merged = merge_linears(*(Linear.stored(f"{name}.{part}", width) for part, width in stored.items()))
    projected = call.matmul(b, x, w, merged)
    decay, update, mixed, gate = b.ops("Split", projected, b.constant(list(widths.values())), outputs=4, axis=-1)
    return b.op("Concat", mixed, decay, update, axis=-1), gate


def _by_kind(b: GraphBuilder, x: ir.Value, heads: int, widths: list[int]) -> tuple[ir.Value, ...]:
    """Split ``x``, which has ``widths`` values of each kind per key head, into all values of each kind."""
    headed = _reshaped(b, x, heads, sum(widths))
    parts = b.ops("Split", headed, b.constant(widths), outputs=len(widths), axis=-1)
    return tuple(
        _reshaped(b, part, heads * width, dims=len(dims_of(x))) for part, width in zip(parts, widths, strict=True)
    )


def _reshaped(b: GraphBuilder, x: ir.Value, *last: int, dims: int | None = None) -> ir.Value:
    """Return ``x`` with ``last`` in place of its last dimension, or of all from ``dims`` - 1 on."""
    kept = (len(dims_of(x)) if dims is None else dims) - 1
    return b.op("Reshape", x, b.constant([0] * kept + list(last)))


def _weights(b: GraphBuilder, w: Weights, name: str, net: DeltaNet) -> DeltaNetWeights:
    stored = {"conv1d": net.channels}
    if net.projections == "separate":
        keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
        stored = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
    return DeltaNetWeights(
        w.stacked([f"{name}.{part}.weight" for part in stored], list(stored.values()), (1, net.kernel)),
        b.op("Neg", b.op("Exp", b.cast(w.stored(f"{name}.A_log", (net.value_heads,)), "float32"))),
        b.cast(w.stored(f"{name}.dt_bias", (net.value_heads,)), "float32"),
    )


def _span(
    b: GraphBuilder,
    mixed: ir.Value,
    earlier: ir.Value,
    w: Weights,
    weights: DeltaNetWeights,
    net: DeltaNet,
    call: RecurrentCall,
) -> Recurrence:
    """Return the recurrence; ``earlier`` are the tokens before the ``mixed`` ones of the call."""
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    span, lead = call.span(b, earlier, mixed, net)
    qkv, decay, update = b.ops(
        "Split", span, b.constant([net.channels, net.value_heads, net.value_heads]), outputs=3, axis=2
    )
    mixed_qkv = convolved_by(b, qkv, lead, weights.convolution, w.dtype, activation="silu")
    query, key, value = b.ops("Split", mixed_qkv, b.constant([keys, keys, values]), outputs=3, axis=2)
    query, key = (
        for_each_head(b, unit_vectors(b, each, net.key_heads, w.dtype, power), net.value_heads)
        for each, power in ((query, 1.0), (key, 0.5))
    )
    gates = (w.dtype, ("batch", "span", net.value_heads))
    decay, update = b.custom(
        "LinearAttentionGate",
        *(decay, weights.dt_bias, weights.decay_scale, update),
        domain=LIBRARY,
        outputs=[gates, gates],
    )
    if net.update_scale != 1.0:
        update = b.op("Mul", update, b.constant(net.update_scale, w.dtype))
    return Recurrence(query, key, value, decay, update, net.state)

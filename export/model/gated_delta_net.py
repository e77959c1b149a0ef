"""Gated delta net: the operator ``linear_attention`` (docs/operators.md), on a CPU operators of onnxruntime."""

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, GraphBuilder
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear, merge_linears
from tandemrt.export.model.norm import normed
from tandemrt.export.model.packed_recurrence import LayerWeights, PackedCall
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
    b: GraphBuilder, x: ir.Value, w: Weights, name: str, net: DeltaNet, call: RecurrentCall | PackedCall, past: Held
) -> tuple[ir.Value, Held]:
    """Append a layer (export/model/recurrent.py)."""
    assert past.state is not None
    weights = _weights(b, w, name, net)
    epsilon = net.norm_eps or call.spec.norm_eps
    if isinstance(call, PackedCall):
        merged, places = _merged(name, net)
        return call.linear_attention(
            b,
            call.matmul(b, x, w, merged),
            weights,
            past,
            w.dtype,
            key_heads=net.key_heads,
            places=places,
            epsilon=epsilon,
            update_scale=net.update_scale,
        )
    mixed, gate = _projected(b, x, w, name, net, call)
    ordered, earlier = call.earlier(b, past.recent, w.dtype)
    out, state = call.run(b, _span(b, mixed, earlier, w, weights, net, call), past.state, w.dtype)
    after = Held(call.tokens.store(b, ordered, mixed), state)
    headed = b.op("Reshape", out, b.constant([0, 0, net.value_heads, net.value_dim]))
    assert weights.norm is not None
    scaled = normed(b, headed, b.cast(weights.norm, w.dtype), w.dtype, epsilon)
    # `gate` has the shape of the output.
    return b.op("Mul", b.op("Reshape", scaled, b.constant([0, 0, net.mixed])), silu(b, gate)), after


def _merged(name: str, net: DeltaNet) -> tuple[Linear, dict[str, int]]:
    """Return the matmul that projects the input, and where the parts of its result are."""
    keys, values, heads = net.key_heads * net.key_dim, net.value_heads * net.value_dim, net.value_heads
    if net.projections == "by key head":
        shared = heads // net.key_heads
        widths = {"in_proj_ba": 2 * heads, "in_proj_qkvz": net.channels + values}
        first = 2 * heads
        starts = {"query_at": first, "key_at": first + net.key_dim, "value_at": first + 2 * net.key_dim}
        starts |= {"gate_at": first + 2 * net.key_dim + shared * net.value_dim, "update_at": 0, "decay_at": shared}
        return _of_parts(name, widths), starts | {"by_key_head": 1}
    starts = {"decay_at": 0, "update_at": heads, "query_at": 2 * heads, "key_at": 2 * heads + keys}
    starts |= {"value_at": 2 * heads + 2 * keys, "gate_at": 2 * heads + net.channels}
    return _of_parts(name, _stored(net)), starts


def _stored(net: DeltaNet) -> dict[str, int]:
    """Return the widths of the weights that project the input, in the order of their names.

    In this order they are adjacent in the file.
    """
    keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
    separate = {"q_proj": keys, "k_proj": keys, "v_proj": values}
    mixed = separate if net.projections == "separate" else {"in_proj_qkv": net.channels}
    return {"in_proj_a": net.value_heads, "in_proj_b": net.value_heads, **mixed, "in_proj_z": values}


def _of_parts(name: str, widths: dict[str, int]) -> Linear:
    return merge_linears(*(Linear.stored(f"{name}.{part}", width) for part, width in widths.items()))


def _projected(
    b: GraphBuilder, x: ir.Value, w: Weights, name: str, net: DeltaNet, call: RecurrentCall
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
    projected = call.matmul(b, x, w, _of_parts(name, _stored(net)))
    widths = [net.value_heads, net.value_heads, net.channels, values]
    decay, update, mixed, gate = b.ops("Split", projected, b.constant(widths), outputs=4, axis=-1)
    return b.op("Concat", mixed, decay, update, axis=-1), gate


def _by_kind(b: GraphBuilder, x: ir.Value, heads: int, widths: list[int]) -> tuple[ir.Value, ...]:
    """Split ``x``, which has ``widths`` values of each kind per key head, into all values of each kind."""
    headed = b.op("Reshape", x, b.constant([0, 0, heads, sum(widths)]))
    parts = b.ops("Split", headed, b.constant(widths), outputs=len(widths), axis=-1)
    return tuple(
        b.op("Reshape", part, b.constant([0, 0, heads * width])) for part, width in zip(parts, widths, strict=True)
    )


def _weights(b: GraphBuilder, w: Weights, name: str, net: DeltaNet) -> LayerWeights:
    stored = {"conv1d": net.channels}
    if net.projections == "separate":
        keys, values = net.key_heads * net.key_dim, net.value_heads * net.value_dim
        stored = {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": values}
    return LayerWeights(
        w.stacked([f"{name}.{part}.weight" for part in stored], list(stored.values()), (1, net.kernel)),
        b.op("Neg", b.op("Exp", b.cast(w.stored(f"{name}.A_log", (net.value_heads,)), "float32"))),
        b.cast(w.stored(f"{name}.dt_bias", (net.value_heads,)), "float32"),
        b.cast(w.stored(f"{name}.norm.weight", (net.value_dim,)), "float32"),
    )


def _span(
    b: GraphBuilder,
    mixed: ir.Value,
    earlier: ir.Value,
    w: Weights,
    weights: LayerWeights,
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
        decay,
        weights.dt_bias,
        weights.decay_scale,
        update,
        domain=LIBRARY,
        outputs=[gates, gates],
    )
    if net.update_scale != 1.0:
        update = b.op("Mul", update, b.constant(net.update_scale, w.dtype))
    return Recurrence(query, key, value, decay, update, net.state)

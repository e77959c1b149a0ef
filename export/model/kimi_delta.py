"""Kimi delta attention: the operator ``linear_attention`` (docs/operators.md), on a CPU operators of onnxruntime."""

from typing import Any

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, GraphBuilder
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear, merge_linears
from tandemrt.export.model.norm import normed
from tandemrt.export.model.packed_recurrence import LayerWeights, PackedCall
from tandemrt.export.model.recurrence import Held, Recurrence, RecurrentCall, convolved, unit_vectors
from tandemrt.export.read.recurrent_layers import KimiDelta


def kimi_delta(
    b: GraphBuilder, x: ir.Value, w: Weights, name: str, net: KimiDelta, call: RecurrentCall | PackedCall, past: Held
) -> tuple[ir.Value, Held]:
    """Append a layer (export/model/recurrent.py): the gated delta rule with one decay per key channel."""
    assert past.state is not None
    rates = b.op("Exp", b.cast(w.stored(f"{name}.A_log", (1, 1, net.heads, 1)), "float32"))
    size = net.head_dim
    stored = {"b": net.heads, "f_a": size, "g_a": size, "q": net.mixed, "k": net.mixed, "v": net.mixed}
    merged = merge_linears(*(Linear.stored(f"{name}.{part}_proj", width) for part, width in stored.items()))
    projected = call.matmul(b, x, w, merged)
    update, decay, gate, qkv = b.ops(
        "Split", projected, b.constant([net.heads, size, size, net.channels]), outputs=4, axis=-1
    )
    decay, gate = (
        Linear.stored(f"{name}.{part}_proj", net.mixed)(b, each, w) for part, each in (("f_b", decay), ("g_b", gate))
    )
    if isinstance(call, PackedCall):
        weights = LayerWeights(
            w.stacked([f"{name}.{part}_conv1d.weight" for part in "qkv"], [net.mixed] * 3, (1, net.kernel)),
            b.op("Neg", b.op("Reshape", rates, b.constant([-1]))),
            b.cast(w.stored(f"{name}.dt_bias", (net.mixed,)), "float32"),
            b.cast(w.stored(f"{name}.norm.weight", (size,)), "float32"),
        )
        starts = {"query_at": 0, "key_at": net.mixed, "value_at": 2 * net.mixed, "decay_at": net.channels}
        starts |= {"update_at": net.channels + net.mixed, "gate_at": net.width}
        parts = b.op("Concat", qkv, decay, update, gate, axis=-1)
        how: dict[str, Any] = {"key_heads": net.heads, "places": starts, "epsilon": call.spec.norm_eps}
        return call.linear_attention(b, parts, weights, past, w.dtype, sigmoid_gate=True, **how)
    mixed = b.op("Concat", qkv, decay, update, axis=2)
    ordered, earlier = call.earlier(b, past.recent, w.dtype)
    out, state = call.run(b, _span(b, mixed, earlier, w, name, net, call, rates), past.state, w.dtype)
    headed = b.op("Reshape", out, b.constant([0, 0, net.heads, size]))
    scaled = normed(b, headed, w(f"{name}.norm.weight", (size,)), w.dtype, call.spec.norm_eps)
    gated = b.op("Mul", b.op("Reshape", scaled, b.constant([0, 0, net.mixed])), b.op("Sigmoid", gate))
    return gated, Held(call.tokens.store(b, ordered, mixed), state)


def _span(
    b: GraphBuilder,
    mixed: ir.Value,
    earlier: ir.Value,
    w: Weights,
    name: str,
    net: KimiDelta,
    call: RecurrentCall,
    rates: ir.Value,
) -> Recurrence:
    """Return the recurrence; ``earlier`` are the tokens before the ``mixed`` ones of the call."""
    span, lead = call.span(b, earlier, mixed, net)
    widths = [net.channels, net.mixed, net.heads]
    qkv, decay, update = b.ops("Split", span, b.constant(widths), outputs=3, axis=2)
    names = [f"{name}.{part}_conv1d" for part in "qkv"]
    qkv = convolved(b, qkv, lead, w, names, [net.mixed] * 3, kernel=net.kernel, activation="silu")
    query, key, value = b.ops("Split", qkv, b.constant([net.mixed] * 3), outputs=3, axis=2)
    query, key = (
        b.op("Reshape", unit_vectors(b, each, net.heads, w.dtype, power), b.constant([0, 0, net.mixed]))
        for each, power in ((query, 1.0), (key, 0.5))
    )
    each = b.op("Expand", b.op("Neg", b.op("Reshape", rates, b.constant([-1, 1]))), b.constant([1, net.head_dim]))
    scale = b.op("Reshape", each, b.constant([-1]))
    bias = b.cast(w.stored(f"{name}.dt_bias", (net.mixed,)), "float32")
    (decay,) = b.custom(
        "LinearAttentionGate", decay, bias, scale, domain=LIBRARY, outputs=[(w.dtype, ("batch", "span", net.mixed))]
    )
    update = b.op("Sigmoid", update)
    return Recurrence(query, key, value, decay, update, net.state)

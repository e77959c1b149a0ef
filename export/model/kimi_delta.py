"""Kimi delta attention on a CPU over a linear cache, by onnxruntime's operators."""

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, GraphBuilder
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear, merge_linears
from tandemrt.export.model.norm import normed
from tandemrt.export.model.recurrence import Held, Recurrence, RecurrentCall, convolved, unit_vectors
from tandemrt.export.read.recurrent_layers import KimiDelta


def kimi_delta(
    b: GraphBuilder, x: ir.Value, w: Weights, name: str, net: KimiDelta, call: RecurrentCall, held: Held
) -> tuple[ir.Value, Held]:
    """Append a layer (export/model/recurrent.py): ``gated_delta_net`` with one decay per key channel."""
    assert held.state is not None
    size = net.head_dim
    stored = {"b": net.heads, "f_a": size, "g_a": size, "q": net.mixed, "k": net.mixed, "v": net.mixed}
    merged = merge_linears(*(Linear.stored(f"{name}.{part}_proj", width) for part, width in stored.items()))
    projected = call.matmul(b, x, w, merged)
    update, decay, gate, qkv = b.ops(
        "Split", projected, b.constant([net.heads, size, size, net.channels]), outputs=4, axis=2
    )
    decay, gate = (
        Linear.stored(f"{name}.{part}_proj", net.mixed)(b, each, w) for part, each in (("f_b", decay), ("g_b", gate))
    )
    mixed = b.op("Concat", qkv, decay, update, axis=2)
    ordered, earlier = call.earlier(b, held.recent, w.dtype)
    out, state = call.run(b, _span(b, mixed, earlier, w, name, net, call), held.state, w.dtype)
    headed = b.op("Reshape", out, b.constant([0, 0, net.heads, size]))
    scaled = normed(b, headed, w(f"{name}.norm.weight", (size,)), w.dtype, call.spec.norm_eps)
    gated = b.op("Mul", b.op("Reshape", scaled, b.constant([0, 0, net.mixed])), b.op("Sigmoid", gate))
    return gated, Held(call.tokens.store(b, ordered, mixed), state)


def _span(
    b: GraphBuilder, mixed: ir.Value, earlier: ir.Value, w: Weights, name: str, net: KimiDelta, call: RecurrentCall
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
    rates = b.op("Exp", b.cast(w.stored(f"{name}.A_log", (1, 1, net.heads, 1)), "float32"))
    each = b.op("Expand", b.op("Neg", b.op("Reshape", rates, b.constant([-1, 1]))), b.constant([1, net.head_dim]))
    scale = b.op("Reshape", each, b.constant([-1]))
    bias = b.cast(w.stored(f"{name}.dt_bias", (net.mixed,)), "float32")
    (decay,) = b.custom(
        "LinearAttentionGate", decay, bias, scale, domain=LIBRARY, outputs=[(w.dtype, ("batch", "span", net.mixed))]
    )
    update = b.op("Sigmoid", update)
    return Recurrence(query, key, value, decay, update, net.state)

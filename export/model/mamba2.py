"""Mamba-2: the operator ``linear_attention`` (docs/operators.md), on a CPU operators of onnxruntime."""

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, GraphBuilder, dims_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.norm import normed
from tandemrt.export.model.packed_recurrence import LayerWeights, PackedCall
from tandemrt.export.model.recent_tokens import cut_tokens
from tandemrt.export.model.recurrence import Held, Recurrence, RecurrentCall, convolved, for_each_head, silu
from tandemrt.export.model.scale import scaled_by
from tandemrt.export.read.recurrent_layers import Mamba2, NormOverRanks
from tandemrt.plugins.operators.constants import DOMAIN, OutputNorm


def mamba2(
    b: GraphBuilder, x: ir.Value, w: Weights, name: str, net: Mamba2, call: RecurrentCall | PackedCall, past: Held
) -> tuple[ir.Value, Held]:
    """Append a layer (export/model/recurrent.py).

    For one token, with S the state of a head, k and q those of its group (B and C in the paper)::

        v, k, q = silu(convolution(v, k, q))
        step = softplus(step + dt_bias)
        S = exp(-exp(A_log) * step) * S + k ⊗ (step * v)
        out = norm((Sᵀ q + D * v) * silu(gate))
    """
    assert past.state is not None
    projection = Linear.stored(f"{name}.in_proj", net.mixed + net.width, bias=net.bias)
    projected = _by_part(b, call.matmul(b, scaled_by(b, x, net.scales[0], w.dtype), w, projection), net, w.dtype)
    if isinstance(call, PackedCall):
        out, after = _packed(b, projected, w, name, net, call, past)
        return scaled_by(b, out, net.scales[2], w.dtype), after
    gate, mixed = b.ops("Split", projected, b.constant([net.mixed, net.width]), outputs=2, axis=2)
    ordered, earlier = call.earlier(b, past.recent, w.dtype)
    span, value = _span(b, mixed, earlier, w, name, net, call)
    out, state = call.run(b, span, past.state, w.dtype)
    skipped = _by_head(b, cut_tokens(b, value, start=call.tokens.replayed), net)
    direct = b.op("Mul", skipped, b.op("Unsqueeze", w(f"{name}.D", (net.heads,)), b.constant([1])))
    out = b.op("Add", out, b.op("Reshape", direct, b.constant([0, 0, net.mixed])))
    gated = _gated(b, out, gate, w, name, net, call.spec.norm_eps)
    return scaled_by(b, gated, net.scales[2], w.dtype), Held(call.tokens.store(b, ordered, mixed), state)


def _packed(
    b: GraphBuilder, projected: ir.Value, w: Weights, name: str, net: Mamba2, call: PackedCall, past: Held
) -> tuple[ir.Value, Held]:
    keys, over = net.groups * net.state_dim, net.norm_over_ranks
    starts = {"gate_at": 0, "value_at": net.mixed, "key_at": 2 * net.mixed, "query_at": 2 * net.mixed + keys}
    weights = LayerWeights(
        w.stacked([f"{name}.conv1d.weight"], [net.channels], (1, net.kernel)),
        _decay_scale(b, w, name, net),
        b.cast(w.stored(f"{name}.dt_bias", (net.heads,)), "float32"),
        None if net.norm is None or over else b.cast(w.stored(f"{name}.norm.weight", (net.mixed,)), "float32"),
        w(f"{name}.conv1d.bias", (net.channels,)) if net.conv_bias else None,
        b.cast(w.stored(f"{name}.D", (net.heads,)), "float32"),
    )
    out, after = call.linear_attention(
        b,
        projected,
        weights,
        past,
        w.dtype,
        key_heads=net.groups,
        places=starts | {"decay_at": 2 * net.mixed + 2 * keys},
        norm=OutputNorm.AFTER_GATE if net.norm == "after the gate" else OutputNorm.BEFORE_GATE,
        norm_groups=net.groups,
        epsilon=call.spec.norm_eps,
    )
    if over is None:
        return out, after
    unit = _normed_over_ranks(b, out, over, net.mixed, w.dtype, call.spec.norm_eps)
    return b.op("Mul", unit, w(f"{name}.norm.weight", (net.mixed,))), after


def _normed_over_ranks(
    b: GraphBuilder, x: ir.Value, over: NormOverRanks, mixed: int, dtype: str, eps: float
) -> ir.Value:
    """Return a rank's ``x`` [..., mixed], normed in groups of what all ranks have."""
    whole = over.ranks * mixed
    typed = [(dtype, (*dims_of(x)[:-1], whole))]
    (gathered,) = b.custom("all_gather", x, domain=DOMAIN, outputs=typed, width=whole)
    unit = _normed_in_groups(b, gathered, over.groups, whole, dtype, eps)
    begin = over.rank * mixed
    return b.op("Slice", unit, b.constant([begin]), b.constant([begin + mixed]), b.constant([-1]))


def _decay_scale(b: GraphBuilder, w: Weights, name: str, net: Mamba2) -> ir.Value:
    return b.op("Neg", b.op("Exp", b.cast(w.stored(f"{name}.A_log", (net.heads,)), "float32")))


def _span(
    b: GraphBuilder, mixed: ir.Value, earlier: ir.Value, w: Weights, name: str, net: Mamba2, call: RecurrentCall
) -> tuple[Recurrence, ir.Value]:
    """Return the recurrence, and the values after the convolution; ``earlier`` are the tokens before ``mixed``."""
    keys = net.groups * net.state_dim
    span, lead = call.span(b, earlier, mixed, net)
    vkq, step = b.ops("Split", span, b.constant([net.channels, net.heads]), outputs=2, axis=2)
    vkq = convolved(
        b, vkq, lead, w, [f"{name}.conv1d"], [net.channels], kernel=net.kernel, bias=net.conv_bias, activation="silu"
    )
    value, key, query = b.ops("Split", vkq, b.constant([net.mixed, keys, keys]), outputs=3, axis=2)
    ones = b.constant([1.0] * net.heads, "float32")
    bias = b.cast(w.stored(f"{name}.dt_bias", (net.heads,)), "float32")
    (step,) = b.custom(  # its softplus, times 1, gives a token the same bits in any call
        "LinearAttentionGate", step, bias, ones, domain=LIBRARY, outputs=[(w.dtype, ("batch", "span", net.heads))]
    )
    scale = _decay_scale(b, w, name, net)
    stepped = b.op("Mul", _by_head(b, value, net), b.op("Unsqueeze", step, b.constant([3])))
    query, key = (
        for_each_head(b, b.op("Reshape", each, b.constant([0, 0, net.groups, net.state_dim])), net.heads)
        for each in (query, key)
    )
    stepped = b.op("Reshape", stepped, b.constant([0, 0, net.mixed]))
    return Recurrence(query, key, stepped, b.op("Mul", step, scale), None, net.state), value


def _by_part(b: GraphBuilder, projected: ir.Value, net: Mamba2, dtype: str) -> ir.Value:
    """Multiply gate, values, keys, queries and step size by a constant each."""
    keys = net.groups * net.state_dim
    sizes = (net.mixed, net.mixed, keys, keys, net.heads)
    each = [scale for scale, size in zip(net.scales[1], sizes, strict=True) for _ in range(size)]
    return projected if set(each) == {1.0} else b.op("Mul", projected, b.constant(each, dtype))


def _by_head(b: GraphBuilder, x: ir.Value, net: Mamba2) -> ir.Value:
    return b.op("Reshape", x, b.constant([0, 0, net.heads, net.head_dim]))


def _gated(b: GraphBuilder, x: ir.Value, gate: ir.Value, w: Weights, name: str, net: Mamba2, eps: float) -> ir.Value:
    """Return ``x`` times silu(gate), and its norm in each group of heads, in the order of the layer."""
    if net.norm is None:
        return b.op("Mul", x, silu(b, gate))
    if net.norm == "after the gate":
        x = b.op("Mul", x, silu(b, gate))
    unit = _normed_in_groups(b, x, net.groups, net.mixed, w.dtype, eps)
    scaled = b.op("Mul", unit, w(f"{name}.norm.weight", (net.mixed,)))
    return scaled if net.norm == "after the gate" else b.op("Mul", scaled, silu(b, gate))


def _normed_in_groups(b: GraphBuilder, x: ir.Value, groups: int, width: int, dtype: str, eps: float) -> ir.Value:
    """Return the norm of ``x`` [..., width] in each group, without a weight."""
    size, kept = width // groups, [0] * (len(dims_of(x)) - 1)
    grouped = b.op("Reshape", x, b.constant([*kept, groups, size]))
    unit = normed(b, grouped, b.constant([1.0] * size, dtype), dtype, eps)
    return b.op("Reshape", unit, b.constant([*kept, width]))

"""The layers of a decoder, written once for all lowerings.

Shapes use the symbols of engines/contract.py; ``hidden``, the stream of residuals, is [batch, query, hidden size], or
over a paged cache [tokens, hidden size]: nothing here knows rows. Values that a graph may be cut at
(export/passes/cut.py) have names that speak: ``hidden.3`` is the stream in front of layer 3's attention,
``residual.3`` behind it.
"""

from collections.abc import Mapping

import onnx_ir as ir

from tandemrt.export.model.activation import GatedActivation
from tandemrt.export.model.attention import Cache, Heads
from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.experts import mixture
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.lowerings import Strategies
from tandemrt.export.model.norm import rms_norm
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.spec import ModelSpec


def stack(
    b: GraphBuilder,
    hidden: ir.Value,
    w: Weights,
    spec: ModelSpec,
    given: Mapping[str, ir.Value],
    how: Strategies,
    *,
    capacity: int,
) -> tuple[ir.Value, dict[str, ir.Value]]:
    """All layers and the last norm: the stream to [batch, rows, hidden], and the caches afterwards.

    ``given`` are the inputs of the contract, what is returned with the result are its outputs present_*.
    """
    rows = given["score_rows"]
    with b.scope("place"):
        attend = how.attention(b, spec, given, capacity=capacity, dtype=w.dtype)
    presents: dict[str, ir.Value] = {}
    for layer in range(spec.layers):
        name = f"model.layers.{layer}"
        with b.scope(f"layers.{layer}/attention"):
            hidden.name = f"hidden.{layer}"
            past = Cache(given[f"past_key.{layer}"], given[f"past_value.{layer}"])
            normed = _normed(b, hidden, w, spec, name, spec.norms.before_attention)
            mixed, present = attend(b, normed, w, _heads(spec, layer, f"{name}.self_attn"), past)
            presents |= {f"present_key.{layer}": present.key, f"present_value.{layer}": present.value}
            if how.pick_early and layer == spec.layers - 1:  # what nobody reads costs nothing from here on
                hidden, mixed = (how.pick(b, value, rows) for value in (hidden, mixed))
            out = Linear.stored(f"{name}.self_attn.o_proj", spec.hidden, bias=spec.out_bias)
            given_back = _normed(b, out(b, mixed, w), w, spec, name, spec.norms.after_attention)
            hidden = _added(b, hidden, given_back, spec, w.dtype)
        with b.scope(f"layers.{layer}/mlp"):
            hidden.name = f"residual.{layer}"
            normed = _normed(b, hidden, w, spec, name, spec.norms.before_mlp)
            experts = spec.experts_of(layer)
            if experts is None:
                given_back = _mlp(b, normed, w, spec, layer, f"{name}.mlp", how.activation)
            else:
                given_back = mixture(b, normed, w, spec, experts, f"{name}.mlp")
            hidden = _added(b, hidden, _normed(b, given_back, w, spec, name, spec.norms.after_mlp), spec, w.dtype)
    with b.scope("head"):
        if not how.pick_early:  # only rows that somebody reads cost a norm and a product
            hidden = how.pick(b, hidden, rows)
        return rms_norm(b, hidden, w, "model.norm", spec), presents


def _normed(b: GraphBuilder, x: ir.Value, w: Weights, spec: ModelSpec, layer: str, name: str | None) -> ir.Value:
    """``x`` through the norm that the layer has at this place, if it has one."""
    return x if name is None else rms_norm(b, x, w, f"{layer}.{name}", spec)


def _added(b: GraphBuilder, hidden: ir.Value, x: ir.Value, spec: ModelSpec, dtype: str) -> ir.Value:
    return b.op("Add", hidden, times(b, x, spec.scales.residual, dtype))


def times(b: GraphBuilder, x: ir.Value, factor: float, dtype: str) -> ir.Value:
    """``x`` times a constant; ``x`` itself if that is 1."""
    return x if factor == 1.0 else b.op("Mul", x, b.constant(factor, dtype))


def _heads(spec: ModelSpec, layer: int, name: str) -> Heads:
    counts = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
    query, key, value = (
        Linear.stored(f"{name}.{kind}_proj", count * spec.head_dim, bias=spec.qkv_bias)
        for kind, count in counts.items()
    )
    return Heads(
        layer=layer,
        query=query,
        key=key,
        value=value,
        norms=(f"{name}.{spec.qk_norm.query}", f"{name}.{spec.qk_norm.key}") if spec.qk_norm else None,
        rope=spec.rope_of(layer),
        sliding_window=spec.window_of(layer),
    )


def _mlp(
    b: GraphBuilder, x: ir.Value, w: Weights, spec: ModelSpec, layer: int, name: str, activation: GatedActivation
) -> ir.Value:
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""
    gate, up = (Linear.stored(f"{name}.{kind}_proj", spec.intermediate, bias=spec.mlp_bias) for kind in ("gate", "up"))
    down = Linear.stored(f"{name}.down_proj", spec.hidden, bias=spec.mlp_bias)
    return down(b, activation(b, x, w, gate if spec.gated else None, up, kind=spec.activation, layer=layer), w)

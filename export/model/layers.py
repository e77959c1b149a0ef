"""The layers of a decoder, written once for all lowerings.

Shapes use the symbols of engines/contract.py; ``hidden``, the stream of residuals, is [batch, query, hidden size], or
over a paged cache [tokens, hidden size]: nothing here knows rows. Values that a graph may be cut at
(export/passes/cut.py) have names that speak: ``hidden.3`` is the stream in front of layer 3's attention,
``residual.3`` behind it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from tandemrt.export.model.activation import GatedActivation
from tandemrt.export.model.attention import Attention, Cache, Heads
from tandemrt.export.model.builder import GraphBuilder
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
    features: Sequence[int] = (),
) -> tuple[ir.Value, dict[str, ir.Value]]:
    """All layers and the last norm: the stream to [batch, rows, hidden], and the caches afterwards.

    ``given`` are the inputs of the contract, what is returned with the result are its outputs present_*, and the
    streams in front of the layers ``features``, one behind the other, if there are any. The number of layers names what
    stands behind the last norm.
    """
    rows = given["score_rows"]
    if spec.layers in features:  # of every token, so that none may be left out before
        how = replace(how, pick_early=False)
    with b.scope("place"):
        attend = how.attention(b, spec, given, capacity=capacity, dtype=w.dtype)
    made: dict[str, ir.Value] = {}
    streams = []
    for layer in range(spec.layers):
        name = f"model.layers.{layer}"
        hidden.name = f"hidden.{layer}"
        streams.append(hidden)
        with b.scope(f"layers.{layer}/attention"):
            normed = normed_by(b, hidden, w, spec, name, spec.norms.before_attention)
        hidden, present = block(b, hidden, normed, w, spec, given, how, attend, layer, name)
        made |= present
    with b.scope("head"):
        if spec.layers in features:
            streams.append(rms_norm(b, hidden, w, "model.norm", spec))
            normed = how.pick(b, streams[-1], rows)
        else:
            if not how.pick_early:  # only rows that somebody reads cost a norm and a product
                hidden = how.pick(b, hidden, rows)
            normed = rms_norm(b, hidden, w, "model.norm", spec)
    if features:  # behind all norms: a stream that is read in front of its norm is not fused with it
        with b.scope("features"):
            wanted = [streams[layer] for layer in features]
            made["features"] = b.op("Concat", *wanted, axis=-1) if len(wanted) > 1 else b.op("Identity", *wanted)
    return normed, made


def block(
    b: GraphBuilder,
    stream: ir.Value,
    normed: ir.Value,
    w: Weights,
    spec: ModelSpec,
    given: Mapping[str, ir.Value],
    how: Strategies,
    attend: Attention,
    layer: int,
    name: str,
) -> tuple[ir.Value, dict[str, ir.Value]]:
    """Layer ``layer`` by the weights called ``name``: attention over ``normed``, then the MLP or the experts.

    Returns the stream behind it, of the last layer only the rows that get logits where ``how`` picks early, and its
    caches afterwards by their names in the contract.
    """
    with b.scope(f"layers.{layer}/attention"):
        past = Cache(given[f"past_key.{layer}"], given[f"past_value.{layer}"])
        mixed, present = attend(b, normed, w, heads_of(spec, layer, f"{name}.self_attn"), past)
        if how.pick_early and layer == spec.layers - 1:  # what nobody reads costs nothing from here on
            stream, mixed = (how.pick(b, value, given["score_rows"]) for value in (stream, mixed))
        out = Linear.stored(f"{name}.self_attn.o_proj", spec.hidden, bias=spec.out_bias)
        given_back = normed_by(b, out(b, mixed, w), w, spec, name, spec.norms.after_attention)
        stream = _added(b, stream, given_back, spec, w.dtype)
    with b.scope(f"layers.{layer}/mlp"):
        stream.name = f"residual.{layer}"
        normed = normed_by(b, stream, w, spec, name, spec.norms.before_mlp)
        experts = spec.experts_of(layer)
        if experts is None:
            given_back = _mlp(b, normed, w, spec, layer, f"{name}.mlp", how.activation)
        else:
            given_back = how.mixture(b, normed, w, spec, experts, f"{name}.mlp")
        stream = _added(b, stream, normed_by(b, given_back, w, spec, name, spec.norms.after_mlp), spec, w.dtype)
    return stream, {f"present_key.{layer}": present.key, f"present_value.{layer}": present.value}


def normed_by(b: GraphBuilder, x: ir.Value, w: Weights, spec: ModelSpec, layer: str, name: str | None) -> ir.Value:
    """``x`` through the norm that the layer has at this place, if it has one."""
    return x if name is None else rms_norm(b, x, w, f"{layer}.{name}", spec)


def _added(b: GraphBuilder, hidden: ir.Value, x: ir.Value, spec: ModelSpec, dtype: str) -> ir.Value:
    return b.op("Add", hidden, times(b, x, spec.scales.residual, dtype))


def times(b: GraphBuilder, x: ir.Value, factor: float, dtype: str) -> ir.Value:
    """``x`` times a constant; ``x`` itself if that is 1."""
    return x if factor == 1.0 else b.op("Mul", x, b.constant(factor, dtype))


def heads_of(spec: ModelSpec, layer: int, name: str) -> Heads:
    """What the attention of a layer is made of, by the weights called ``name``."""
    counts = {"q": spec.heads, "k": spec.kv_heads, "v": spec.kv_heads}
    query, key, value = (
        Linear.stored(f"{name}.{kind}_proj", count * spec.head_dim, bias=spec.qkv_bias)
        for kind, count in counts.items()
    )
    return Heads(
        name=name,
        layer=layer,
        query=query,
        key=key,
        value=value,
        norms=(f"{name}.{spec.qk_norm.query}", f"{name}.{spec.qk_norm.key}") if spec.qk_norm else None,
        rope=spec.rope_of(layer),
        sliding_window=spec.window_of(layer),
        sinks=f"{name}.sinks" if spec.sinks else None,
    )


def _mlp(
    b: GraphBuilder, x: ir.Value, w: Weights, spec: ModelSpec, layer: int, name: str, activation: GatedActivation
) -> ir.Value:
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""
    gate, up = (Linear.stored(f"{name}.{kind}_proj", spec.intermediate, bias=spec.mlp_bias) for kind in ("gate", "up"))
    down = Linear.stored(f"{name}.down_proj", spec.hidden, bias=spec.mlp_bias)
    return down(b, activation(b, x, w, gate if spec.gated else None, up, kind=spec.activation, layer=layer), w)

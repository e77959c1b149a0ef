"""The layers of a decoder, written once for all lowerings.

Shapes use the symbols of engines/contract.py; ``hidden``, the stream of residuals, is [batch, query, hidden size], or
over a paged cache [tokens, hidden size]: nothing here knows rows. Values that a graph may be cut at
(export/passes/cut.py) have names that speak: ``hidden.3`` is the stream in front of layer 3's attention,
``residual.3`` behind it.
"""

from collections.abc import Mapping, Sequence

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
    streams in front of the layers ``features``, one behind the other, if there are any.
    """
    rows = given["score_rows"]
    with b.scope("place"):
        attend = how.attention(b, spec, given, capacity=capacity, dtype=w.dtype)
    made: dict[str, ir.Value] = {}
    streams = []
    for layer in range(spec.layers):
        name = f"model.layers.{layer}"
        hidden.name = f"hidden.{layer}"
        streams.append(hidden)
        with b.scope(f"layers.{layer}/attention"):
            normed = rms_norm(b, hidden, w, f"{name}.input_layernorm", spec.norm_eps)
        hidden, present = block(b, hidden, normed, w, spec, given, how, attend, layer, name)
        made |= present
    with b.scope("head"):
        if not how.pick_early:  # only rows that somebody reads cost a norm and a product
            hidden = how.pick(b, hidden, rows)
        normed = rms_norm(b, hidden, w, "model.norm", spec.norm_eps)
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
    """Layer ``layer`` by the weights called ``name``: attention over ``normed``, then the gated product.

    Returns the stream behind it, of the last layer only the rows that get logits where ``how`` picks early, and its
    caches afterwards by their names in the contract.
    """
    with b.scope(f"layers.{layer}/attention"):
        past = Cache(given[f"past_key.{layer}"], given[f"past_value.{layer}"])
        mixed, present = attend(b, normed, w, _heads(spec, layer, f"{name}.self_attn"), past)
        if how.pick_early and layer == spec.layers - 1:  # what nobody reads costs nothing from here on
            stream, mixed = (how.pick(b, value, given["score_rows"]) for value in (stream, mixed))
        out = Linear.stored(f"{name}.self_attn.o_proj", spec.hidden, bias=spec.out_bias)
        stream = b.op("Add", stream, out(b, mixed, w))
    with b.scope(f"layers.{layer}/mlp"):
        stream.name = f"residual.{layer}"
        normed = rms_norm(b, stream, w, f"{name}.post_attention_layernorm", spec.norm_eps)
        stream = b.op("Add", stream, _gated_mlp(b, normed, w, spec, layer, f"{name}.mlp", how.activation))
    return stream, {f"present_key.{layer}": present.key, f"present_value.{layer}": present.value}


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
        norms=(f"{name}.q_norm", f"{name}.k_norm") if spec.qk_norm else None,
        sliding_window=spec.sliding_window if spec.sliding_layers[layer] else None,
    )


def _gated_mlp(
    b: GraphBuilder, x: ir.Value, w: Weights, spec: ModelSpec, layer: int, name: str, activation: GatedActivation
) -> ir.Value:
    """down(silu(gate(x)) * up(x))."""
    gate, up = (Linear.stored(f"{name}.{kind}_proj", spec.intermediate, bias=spec.mlp_bias) for kind in ("gate", "up"))
    down = Linear.stored(f"{name}.down_proj", spec.hidden, bias=spec.mlp_bias)
    return down(b, activation(b, x, w, gate, up, layer=layer), w)

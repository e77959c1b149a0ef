"""The layers of a decoder, written once for all lowerings.

Shapes use the symbols of engines/contract/contract.py. ``hidden``, the residual stream, is [batch, query, hidden size],
or over a paged cache [tokens, hidden size]. The values that a graph may be cut at (export/passes/cut.py) have fixed
names: ``hidden.3`` is the residual stream before the attention of layer 3, ``residual.3`` the stream after it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.activation import GatedActivation, activate, clamped_swiglu, xielu
from tandemrt.export.model.attention import Attention, AttentionWeights, LayerCache
from tandemrt.export.model.experts import is_like_the_others
from tandemrt.export.model.layer_inputs import with_own_input
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.lowerings import LoweringStrategies
from tandemrt.export.model.norm import normed as norm_by
from tandemrt.export.model.norm import stored_norm
from tandemrt.export.model.recurrent import Recurrent
from tandemrt.export.model.scale import scaled_by
from tandemrt.export.read.layer import UNIFORM, Experts, SharedExpert
from tandemrt.export.read.spec import ModelSpec

# Work around a sublayer: (builder, its normed input, weights, name of the work's tensors) -> its input, and what to do
# with its output.
Around = Callable[[GraphBuilder, ir.Value, Weights, str], tuple[ir.Value, Callable[[ir.Value], ir.Value]]]


def decoder_layers(
    b: GraphBuilder,
    hidden: ir.Value,
    w: Weights,
    spec: ModelSpec,
    graph_inputs: Mapping[str, ir.Value],
    strategies: LoweringStrategies,
    *,
    capacity: int,
    features: Sequence[int],
    norms_all: bool,
    own_inputs: Sequence[ir.Value],
    updates: Sequence[ir.Value],
) -> tuple[ir.Value, dict[str, ir.Value]]:
    """Append all layers and the last norm. Returns the normed stream [batch, rows, hidden], and outputs by name.

    ``graph_inputs`` are the inputs of the contract, ``own_inputs`` those of each layer if it has one
    (export/model/layer_inputs.py). The first layers add ``updates``, one each (export/model/image_states.py). The
    outputs are the caches present_* and, if ``features`` is not empty, the concatenated residual streams before these
    layers. The number of layers stands for the stream after the last norm; it needs ``norms_all``: the last norm is of
    all rows, and ``strategies`` must not select rows early.
    """
    rows = graph_inputs["score_rows"]
    with b.scope("place"):
        attend = strategies.attention(b, spec, graph_inputs, capacity=capacity, dtype=w.dtype)
        net = spec.recurrent
        recur = None if net is None else Recurrent(net, strategies.recurrence(b, spec, net, graph_inputs))
    graph_outputs: dict[str, ir.Value] = {}
    streams: list[ir.Value] = []
    for layer in range(spec.layers):
        name = f"model.layers.{layer}"
        for skip in spec.skips:
            if skip.target == layer:
                kept = scaled_by(b, hidden, 1 - skip.weight, w.dtype)
                hidden = b.op("Add", scaled_by(b, streams[skip.source], skip.weight, w.dtype), kept)
        hidden.name = f"hidden.{layer}"
        streams.append(hidden)
        with b.scope(f"layers.{layer}/attention"):
            normed = norm_if_present(b, hidden, w, spec, name, spec.norms_of(layer).before_attention)
        hidden, present = decoder_layer(
            b, hidden, normed, w, spec, {**graph_inputs, **graph_outputs}, strategies, attend, layer, name, recur
        )
        graph_outputs |= present
        if layer < len(updates):
            with b.scope(f"layers.{layer}/images"):
                hidden = b.op("Add", hidden, updates[layer])
        if spec.variants != UNIFORM:
            with b.scope(f"layers.{layer}/input"):
                own = own_inputs[layer] if own_inputs else None
                if own is not None and strategies.select_rows_early and layer == spec.layers - 1:
                    own = strategies.select_rows(b, own, rows)
                hidden = with_own_input(b, hidden, own, w, spec, name)
    with b.scope("head"):
        if norms_all:
            streams.append(stored_norm(b, hidden, w, "model.norm", spec))
            normed = strategies.select_rows(b, streams[-1], rows)
        else:
            if not strategies.select_rows_early:  # norm only the rows that get logits
                hidden = strategies.select_rows(b, hidden, rows)
            normed = stored_norm(b, hidden, w, "model.norm", spec)
    if features:  # after all norms: a stream that is read before its norm cannot be fused with it
        with b.scope("features"):
            wanted = [streams[layer] for layer in features]
            graph_outputs["features"] = (
                b.op("Concat", *wanted, axis=-1) if len(wanted) > 1 else b.op("Identity", *wanted)
            )
    return normed, graph_outputs


def decoder_layer(
    b: GraphBuilder,
    stream: ir.Value,
    normed: ir.Value,
    w: Weights,
    spec: ModelSpec,
    graph_inputs: Mapping[str, ir.Value],
    strategies: LoweringStrategies,
    attend: Attention,
    layer: int,
    name: str,
    recur: Recurrent | None = None,
    around: Around | None = None,
) -> tuple[ir.Value, dict[str, ir.Value]]:
    """Append layer ``layer`` with the weights called ``name``: attention over ``normed``, then the MLP or the experts.

    ``graph_inputs`` also has the updated caches of earlier layers, which a layer without keys reads. A recurrent layer
    has ``recur`` in place of attention. ``around`` needs all rows. Returns the residual stream after it, and its
    updated caches by their names in the contract. With ``strategies.select_rows_early`` the stream after the last layer
    has only the rows that get logits.
    """
    norms = spec.norms_of(layer)
    entered = stream
    with b.scope(f"layers.{layer}/attention"):
        finish: Callable[[ir.Value], ir.Value] | None = None
        if around is not None:
            normed, finish = around(b, normed, w, f"{name}.attention_conv")
        parts: list[tuple[ir.Value, Linear, float]] = []
        present: dict[str, ir.Value] = {}
        if recur is not None and spec.recurrent_of(layer) is not None:
            module = f"{name}.{recur.net.module}"
            mixed, caches = recur(b, normed, w, module, layer, graph_inputs)
            parts.append((mixed, Linear.stored(f"{module}.out_proj", spec.hidden, bias=recur.net.bias), 1.0))
            present |= caches
        if spec.has_attention(layer):
            mixed, caches = _attention(b, normed, w, spec, graph_inputs, attend, layer, name)
            out = Linear.stored(f"{name}.self_attn.o_proj", spec.hidden, bias=spec.out_bias)
            parts.append((mixed, out, spec.scales.attention_output))
            present |= caches
        updates = []
        selects_rows = strategies.select_rows_early and layer == spec.layers - 1
        for mixed, out, factor in parts:
            if selects_rows:  # only rows that get logits from here on
                mixed = strategies.select_rows(b, mixed, graph_inputs["score_rows"])
            updates.append(scaled_by(b, out(b, mixed, w), factor, w.dtype))
        if selects_rows:
            entered = stream = strategies.select_rows(b, stream, graph_inputs["score_rows"])
            if norms.parallel and norms.before_mlp is None:
                normed = strategies.select_rows(b, normed, graph_inputs["score_rows"])
        update = updates[0] if len(updates) == 1 else b.op("Add", *updates)
        update = update if finish is None else finish(update)
        stream = _added(b, stream, norm_if_present(b, update, w, spec, name, norms.after_attention), spec, w.dtype)
    if not spec.has_mlp(layer):
        return stream, present
    with b.scope(f"layers.{layer}/mlp"):
        stream.name = f"residual.{layer}"
        if not norms.parallel:
            normed = norm_if_present(b, stream, w, spec, name, norms.before_mlp)
        elif norms.before_mlp is not None:
            normed = norm_if_present(b, entered, w, spec, name, norms.before_mlp)
        if around is not None:
            normed, finish = around(b, normed, w, f"{name}.mlp_conv")
        experts = spec.experts_of(layer)
        if experts is None:
            width = spec.intermediate_of(layer)
            update = _mlp(b, normed, w, spec, layer, f"{name}.mlp", width, strategies.activation)
        else:
            update = _experts(b, stream, normed, w, spec, experts, strategies, layer, name)
        update = update if finish is None else finish(update)
        after = norms.after_mlp if experts is None else experts.output_norm or norms.after_mlp
        stream = _added(b, stream, norm_if_present(b, update, w, spec, name, after), spec, w.dtype)
    return stream, present


def _attention(
    b: GraphBuilder,
    normed: ir.Value,
    w: Weights,
    spec: ModelSpec,
    graph_inputs: Mapping[str, ir.Value],
    attend: Attention,
    layer: int,
    name: str,
) -> tuple[ir.Value, dict[str, ir.Value]]:
    """Return the output of attention before its last matmul, and the updated caches by their names in the contract."""
    source = spec.cache_of(layer)
    names = [each for each in (f"key.{source}", f"value.{source}") if f"past_{each}" in graph_inputs]
    kind = "past" if source == layer else "present"
    tensors = [graph_inputs[f"{kind}_{each}"] for each in names]
    cached = LayerCache(tensors[0], tensors[-1])
    normed = scaled_by(b, normed, spec.scales.attention_input, w.dtype)
    mixed, cache = attend(b, normed, w, attention_weights(spec, layer, f"{name}.self_attn"), cached)
    return mixed, dict(zip((f"present_{each}" for each in names), (cache.key, cache.value), strict=False))


def norm_if_present(
    b: GraphBuilder, x: ir.Value, w: Weights, spec: ModelSpec, layer: str, name: str | None
) -> ir.Value:
    """Return ``x`` normed by the layer's norm ``name``; ``x`` itself if the layer has no norm here."""
    return x if name is None else stored_norm(b, x, w, f"{layer}.{name}", spec)


def _added(b: GraphBuilder, hidden: ir.Value, x: ir.Value, spec: ModelSpec, dtype: str) -> ir.Value:
    return b.op("Add", hidden, scaled_by(b, x, spec.scales.residual, dtype))


def attention_weights(spec: ModelSpec, layer: int, name: str) -> AttentionWeights:
    """Return the attention weights of a layer, whose tensors are called ``name``."""
    heads, norm, rope, gate = spec.heads_of(layer), spec.qk_norm, spec.rope_of(layer), spec.variants.gate
    widths = {
        "q": heads.query * heads.dim * (2 if spec.gated_attention else 1),
        "k": heads.kv * heads.dim,
        "v": heads.kv * (spec.variants.value_dim or heads.dim),
    }
    query, key, value = (
        _by_head(f"{name}.heads", kind, width, heads.kv, spec.qkv_bias)
        if kind in spec.stored_by_head
        else Linear.stored(f"{name}.{kind}_proj", width, bias=spec.qkv_bias)
        for kind, width in widths.items()
    )
    return AttentionWeights(
        name=name,
        layer=layer,
        heads=heads,
        query=query,
        key=key,
        value=value,
        norms=(f"{name}.{norm.query}", f"{name}.{norm.key}")
        if norm and not (norm.only_rotated and rope is None)
        else None,
        rope=rope,
        sliding_window=spec.window_of(layer),
        sinks=f"{name}.sinks" if spec.sinks_of(layer) else None,
        reads_earlier=spec.cache_of(layer) != layer,
        values_are_keys=spec.variants.values_are_keys and spec.window_of(layer) is None,
        gate=Linear.stored(f"{name}.g_proj", heads.query * (heads.dim if gate.per_value else 1)) if gate else None,
    )


def _by_head(name: str, kind: str, width: int, count: int, bias: bool) -> Linear:
    """Return a matmul whose weight is stored in parts, one for each of ``count`` heads of keys and values."""
    names = tuple(f"{name}.{head}.{kind}_proj" for head in range(count))
    return Linear(names, (width // count,) * count, bias)


def _experts(
    b: GraphBuilder,
    stream: ir.Value,
    normed: ir.Value,
    w: Weights,
    spec: ModelSpec,
    experts: Experts,
    strategies: LoweringStrategies,
    layer: int,
    name: str,
) -> ir.Value:
    """Return the output of the experts, plus that of a shared expert if there is one."""
    norms, mlp, routed = experts.norms, f"{name}.mlp", None
    x = normed
    if norms is not None:
        x = stored_norm(b, stream, w, f"{name}.{norms.before}", spec)
        root = b.constant(spec.hidden**-0.5, w.dtype)
        weight = b.op("Mul", w(f"{mlp}.gate.scale", (spec.hidden,)), root)
        routed = norm_by(b, stream, weight, w.dtype, spec.norm_eps)
    averaged = experts.shared is not None and experts.shared.averaged
    joins = strategies.joins_shared_expert and not averaged and is_like_the_others(w, spec, experts, mlp)
    mixed = experts if joins else replace(experts, shared=None)
    update = strategies.mixture(b, x, w, spec, mixed, mlp, routed)
    if experts.shared is None or joins:
        return update
    shared = _shared_expert(b, normed, w, spec, layer, mlp, experts.shared, strategies.activation)
    if norms is not None:
        update = stored_norm(b, update, w, f"{name}.{norms.after}", spec)
        shared = stored_norm(b, shared, w, f"{name}.{norms.after_shared}", spec)
    return scaled_by(b, b.op("Add", update, shared), 0.5 if averaged else 1.0, w.dtype)


def _shared_expert(
    b: GraphBuilder,
    x: ir.Value,
    w: Weights,
    spec: ModelSpec,
    layer: int,
    name: str,
    shared: SharedExpert,
    activation: GatedActivation,
) -> ir.Value:
    """Return the output of the MLP that every token runs, times its gate if it has one."""
    output = _mlp(b, x, w, spec, layer, f"{name}.{shared.name}", shared.intermediate, activation)
    if shared.gate is None:
        return output
    return b.op("Mul", output, b.op("Sigmoid", Linear.stored(f"{name}.{shared.gate}", 1)(b, x, w)))


def _mlp(
    b: GraphBuilder,
    x: ir.Value,
    w: Weights,
    spec: ModelSpec,
    layer: int,
    name: str,
    width: int,
    activation: GatedActivation,
) -> ir.Value:
    """down(activation(gate(x)) * up(x)), or without a gate down(activation(up(x)))."""
    gate, up = (Linear.stored(f"{name}.{kind}_proj", width, bias=spec.mlp_bias) for kind in ("gate", "up"))
    down = Linear.stored(f"{name}.down_proj", spec.hidden, bias=spec.down_bias)
    if (clamp := spec.mlp_clamp_of(layer)) is not None:
        return down(b, clamped_swiglu(b, gate(b, x, w), up(b, x, w), clamp, w.dtype), w)
    if spec.activation == "xielu":
        return down(b, xielu(b, up(b, x, w), w, f"{name}.act_fn"), w)
    if spec.scales.mlp_gate != 1.0 or spec.scales.mlp_output != 1.0:
        scaled = scaled_by(b, gate(b, x, w), spec.scales.mlp_gate, w.dtype)
        update = down(b, activate(b, scaled, up(b, x, w), spec.activation), w)
        return scaled_by(b, update, spec.scales.mlp_output, w.dtype)
    return down(b, activation(b, x, w, gate if spec.gated else None, up, kind=spec.activation, layer=layer), w)

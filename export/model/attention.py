"""The interface of attention, and attention over a linear cache in standard operators."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.activation import clipped
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.norm import norm_by_head, stored_norm
from tandemrt.export.model.rotary import Rotary, arange, call_positions, query_scales
from tandemrt.export.read.layer import Heads, OutputGate
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, with the shapes of the contract.

    ``value`` is ``key`` if a cached vector is both.
    """

    key: ir.Value
    value: ir.Value


@dataclass(frozen=True)
class AttentionWeights:
    """Weights and settings of one layer's attention.

    Attributes:
        name: prefix of the weights' names in the checkpoint.
        query: with ``gated_attention``, each head's query is followed by its output gate.
        norms: names of the RMS norms of queries and keys; None: the layer has none.
        rope: rotation of queries and keys; None: no rotation.
        sliding_window: number of tokens that a token attends to, itself included; None: all.
        sinks: name of the attention sinks, [heads] logits added to every softmax; None: the layer has none.
        reads_earlier: the layer has no keys and values; it reads the updated cache of an earlier layer.
        values_are_keys: the values are the keys before their norm.
        gate: the matmul of the gate of the output; None: there is none.
    """

    name: str
    layer: int
    heads: Heads
    query: Linear
    key: Linear
    value: Linear
    norms: tuple[str, str] | None
    rope: Rope | None
    sliding_window: int | None
    sinks: str | None
    reads_earlier: bool
    values_are_keys: bool
    gate: Linear | None


def query_and_gate(
    b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, spec: ModelSpec
) -> tuple[ir.Value, ir.Value | None]:
    """Return the queries [..., heads * head_dim], and the logits of the output gate if the attention has one."""
    both = attention.query(b, x, w)
    if not spec.gated_attention:
        return both, None
    headed = b.op("Reshape", both, b.constant([0, 0, spec.heads, 2 * spec.head_dim]))
    parts = b.ops("Split", headed, b.constant([spec.head_dim] * 2), outputs=2, axis=3)
    query, gate = (b.op("Reshape", part, b.constant([0, 0, spec.heads * spec.head_dim])) for part in parts)
    return query, gate


def gated_output(b: GraphBuilder, mixed: ir.Value, gate: ir.Value | None) -> ir.Value:
    """Return the output of attention times sigmoid of its gate; the output itself if it has none."""
    return mixed if gate is None else b.op("Mul", mixed, b.op("Sigmoid", gate))


def gated(
    b: GraphBuilder, mixed: ir.Value, x: ir.Value, w: Weights, attention: AttentionWeights, how: OutputGate | None
) -> ir.Value:
    """Return the output of attention times its gate, a function of a matmul of ``x``; the output itself without one."""
    if attention.gate is None or how is None:
        return mixed
    heads, logits = attention.heads, attention.gate(b, x, w)
    factors = b.op("Sigmoid" if how.function == "sigmoid" else "Softplus", logits)
    if how.per_value:
        return b.op("Mul", mixed, factors)
    split = b.op("Reshape", mixed, b.constant([0, 0, heads.query, heads.dim]))
    product = b.op("Mul", split, b.op("Unsqueeze", factors, b.constant([-1])))
    joined = b.op("Reshape", product, b.constant([0, 0, heads.query * heads.dim]))
    joined.shape = ir.Shape([*dims_of(x)[:2], heads.query * heads.dim])  # a Reshape loses the name of padded tokens
    return joined


def bounded(b: GraphBuilder, x: ir.Value, spec: ModelSpec, dtype: str) -> ir.Value:
    """Return queries, keys or values within the model's bound."""
    bound = spec.scales.qkv_bound
    return clipped(b, x, bound, dtype) if bound else x


class Attention(Protocol):
    """Grouped-query attention that first writes the new tokens into the cache. All layers of a graph share one."""

    def __call__(
        self, b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> tuple[ir.Value, LayerCache]:
        """Return [..., heads * head_dim] for ``x`` [..., hidden], and the updated cache."""
        ...


class AttentionMaker(Protocol):
    """Append the nodes that all layers share (positions, masks, rotary tables) and return the graph's attention.

    ``graph_inputs`` are the inputs of the contract. ``capacity`` is the number of tokens in a cache row.
    """

    def __call__(
        self, b: GraphBuilder, spec: ModelSpec, graph_inputs: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> Attention: ...


@dataclass(frozen=True)
class LinearCacheAttention:
    """Attention over a cache of one row per slot: TensorScatter writes the new tokens, Attention reads the row.

    ``index``: int64[batch], tokens already cached. ``query_scale``: [capacity, 1]. Either ``length`` or ``masks``
    limits the entries that a token attends to. ``length``: int64[batch], cached plus new tokens; a row is then never
    longer than the model's sliding window. ``masks``: bool[batch, 1, query, capacity], by sliding window.
    """

    spec: ModelSpec
    index: ir.Value
    rotary: Rotary
    query_scale: ir.Value | None
    length: ir.Value | None = None
    masks: Mapping[int | None, ir.Value] = field(default_factory=dict)

    @classmethod
    def by_length(
        cls, b: GraphBuilder, spec: ModelSpec, graph_inputs: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> "LinearCacheAttention":
        """Limit attention by the number of valid cache entries; the causal mask is aligned to the end of each row."""
        positions = call_positions(b, graph_inputs["write_index"], graph_inputs["token_ids"])
        # Padded query rows count as well. The length comes from the positions and not from the shape, because the host
        # computes values that depend on shapes, and the index would have to be copied there.
        length = b.op("Add", b.op("ReduceMax", positions, b.constant([1]), keepdims=0), b.constant(1))
        rotary = Rotary.of_call(b, spec, graph_inputs, positions, capacity=capacity, dtype=dtype)
        query_scale = query_scales(b, spec, capacity, dtype)
        return cls(spec, graph_inputs["write_index"], rotary, query_scale, length=length)

    @classmethod
    def by_mask(
        cls, b: GraphBuilder, spec: ModelSpec, graph_inputs: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> "LinearCacheAttention":
        """Limit attention by a boolean mask."""
        positions = call_positions(b, graph_inputs["write_index"], graph_inputs["token_ids"])
        entries, tokens = arange(b, capacity), b.op("Unsqueeze", positions, b.constant([2]))
        masks: dict[int | None, ir.Value] = {}
        for window in dict.fromkeys(spec.window_of(layer) for layer in range(spec.layers)):
            seen = b.op("LessOrEqual", entries, tokens)
            if window is not None:
                seen = b.op("And", seen, b.op("Less", tokens, b.op("Add", entries, b.constant(window))))
            masks[window] = b.op("Unsqueeze", seen, b.constant([1]))
        rotary = Rotary.of_call(b, spec, graph_inputs, positions, capacity=capacity, dtype=dtype)
        query_scale = query_scales(b, spec, capacity, dtype)
        return cls(spec, graph_inputs["write_index"], rotary, query_scale, masks=masks)

    def __call__(
        self, b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> tuple[ir.Value, LayerCache]:
        q_norm, k_norm = attention.norms or (None, None)
        query, key, value = (
            bounded(b, linear(b, x, w), self.spec, w.dtype)
            for linear in (attention.query, attention.key, attention.value)
        )
        query = self._prepared(b, query, w, attention, self.spec.heads, q_norm)
        key = self._prepared(b, key, w, attention, self.spec.kv_heads, k_norm)
        value = self._split(b, value, self.spec.kv_heads)
        if self.query_scale is not None:
            grown = b.op("Gather", self.query_scale, self.rotary.positions)
            query = b.op("Mul", query, b.op("Unsqueeze", grown, b.constant([1])))
        present = LayerCache(
            b.op("TensorScatter", past.key, key, self.index, axis=2, mode="linear"),
            b.op("TensorScatter", past.value, value, self.index, axis=2, mode="linear"),
        )
        mixed = b.op("Transpose", self._mix(b, query, present, attention.sliding_window, w.dtype), perm=[0, 2, 1, 3])
        return b.op("Reshape", mixed, b.constant([0, 0, self.spec.heads * self.spec.head_dim])), present

    def _prepared(
        self, b: GraphBuilder, flat: ir.Value, w: Weights, attention: AttentionWeights, count: int, norm: str | None
    ) -> ir.Value:
        """Queries or keys [batch, query, count * head_dim] as [batch, count, query, head_dim], normed and rotated."""
        how = self.spec.qk_norm
        if norm is not None and how is not None and how.over_all_heads:
            flat, norm = stored_norm(b, flat, w, norm, self.spec), None
        split = self._split(b, flat, count)
        if norm is not None and how is not None and how.by_head:
            split, norm = norm_by_head(b, split, w, norm, count, self.spec, head_axis=1), None
        if norm is not None and how is not None and how.after_rotary:
            return stored_norm(b, self.rotary(b, split, attention.rope, self.spec.head_dim), w, norm, self.spec)
        if norm is not None:
            split = stored_norm(b, split, w, norm, self.spec)
        return self.rotary(b, split, attention.rope, self.spec.head_dim)

    def _split(self, b: GraphBuilder, flat: ir.Value, count: int) -> ir.Value:
        """[batch, query, count * head_dim] to [batch, count, query, head_dim]."""
        split = b.op("Reshape", flat, b.constant([0, 0, count, self.spec.head_dim]))
        return b.op("Transpose", split, perm=[0, 2, 1, 3])

    def _mix(self, b: GraphBuilder, query: ir.Value, present: LayerCache, window: int | None, dtype: str) -> ir.Value:
        """Attention of ``query``; it and the result are [batch, heads, query, head_dim]."""
        scale, cap = self.spec.scales.attention, self.spec.scales.attention_softcap
        capped: dict[str, Any] = {"softcap": cap} if cap else {}
        if self.length is not None:
            inputs = (query, present.key, present.value, None, None, None, self.length)
            return b.op("Attention", *inputs, is_causal=1, scale=scale, **capped)
        # Scale the query here: the operator would multiply both the query and the cache by the root of the scale.
        scaled = b.op("Mul", query, b.constant(scale, dtype))
        key, value = present.key, present.value
        return b.op("Attention", scaled, key, value, self.masks[window], is_causal=0, scale=1.0, **capped)

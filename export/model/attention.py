"""What attention is to a layer, and attention over a linear cache in standard operators."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.norm import rms_norm
from tandemrt.export.model.rotary import Tables, layer_tables, query_growth, ramp_to
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, shaped as the contract says."""

    key: ir.Value
    value: ir.Value


@dataclass(frozen=True)
class Heads:
    """What the attention of one layer is made of, whose weights are called ``name``.

    ``norms`` names the RMS norms of queries and keys, if the model has them. ``rope`` rotates both, None: nothing does.
    ``sliding_window`` is how many tokens a token sees, its own included; None is all of them. ``sinks`` names the
    scores [heads] that take part in every softmax and have no value, if the model has them.
    """

    name: str
    layer: int
    query: Linear
    key: Linear
    value: Linear
    norms: tuple[str, str] | None
    rope: Rope | None
    sliding_window: int | None
    sinks: str | None


class Attention(Protocol):
    """Grouped-query attention over a cache, the new tokens included; made once and shared by all layers."""

    def __call__(self, b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> tuple[ir.Value, Cache]:
        """[..., hidden] to [..., heads * head_dim], and the cache afterwards."""
        ...


class AttentionMaker(Protocol):
    """Makes the attention of a graph: appends what all layers share, which depends on where the new tokens stand.

    ``given`` are the inputs of the contract, ``capacity`` is the number of tokens a cache row holds.
    """

    def __call__(
        self, b: GraphBuilder, spec: ModelSpec, given: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> Attention: ...


@dataclass(frozen=True)
class LinearCacheAttention:
    """Attention over a cache of one row per slot: TensorScatter writes the new tokens, Attention reads them all.

    ``index``: int64[batch], tokens already cached. ``positions``: int64[batch, query]. ``tables``: cosine and sine of
    each rule, [capacity, rotated // 2]. ``growth``: [capacity, 1]. Which cache entries a token sees is said by
    ``length`` (int64[batch], cached plus new tokens; a row is then never longer than the model's sliding window) or by
    ``masks`` (bool[batch, 1, query, capacity], by sliding window).
    """

    spec: ModelSpec
    index: ir.Value
    positions: ir.Value
    tables: Mapping[Rope, Tables]
    growth: ir.Value | None
    length: ir.Value | None = None
    masks: Mapping[int | None, ir.Value] = field(default_factory=dict)

    @classmethod
    def by_length(
        cls, b: GraphBuilder, spec: ModelSpec, given: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> "LinearCacheAttention":
        """Tell the operator how many entries count; it aligns causality to the end of each row's length."""
        positions = _positions(b, given)
        # Padded query rows count as well. Taken from the positions rather than from the shape: what depends on a
        # shape is computed on the host, and the index would have to travel there.
        length = b.op("Add", b.op("ReduceMax", positions, b.constant([1]), keepdims=0), b.constant(1))
        return cls(spec, given["write_index"], positions, *_shared(b, spec, capacity, dtype), length=length)

    @classmethod
    def by_mask(
        cls, b: GraphBuilder, spec: ModelSpec, given: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> "LinearCacheAttention":
        """Give the operator a boolean mask."""
        positions = _positions(b, given)
        entries, tokens = ramp_to(b, capacity), b.op("Unsqueeze", positions, b.constant([2]))
        masks: dict[int | None, ir.Value] = {}
        for window in dict.fromkeys(spec.window_of(layer) for layer in range(spec.layers)):
            seen = b.op("LessOrEqual", entries, tokens)
            if window is not None:
                seen = b.op("And", seen, b.op("Less", tokens, b.op("Add", entries, b.constant(window))))
            masks[window] = b.op("Unsqueeze", seen, b.constant([1]))
        return cls(spec, given["write_index"], positions, *_shared(b, spec, capacity, dtype), masks=masks)

    def __call__(self, b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> tuple[ir.Value, Cache]:
        q_norm, k_norm = heads.norms or (None, None)
        query = self._prepared(b, heads.query(b, x, w), w, heads, self.spec.heads, q_norm)
        key = self._prepared(b, heads.key(b, x, w), w, heads, self.spec.kv_heads, k_norm)
        value = self._split(b, heads.value(b, x, w), self.spec.kv_heads)
        if self.growth is not None:
            grown = b.op("Gather", self.growth, self.positions)
            query = b.op("Mul", query, b.op("Unsqueeze", grown, b.constant([1])))
        present = Cache(
            b.op("TensorScatter", past.key, key, self.index, axis=2, mode="linear"),
            b.op("TensorScatter", past.value, value, self.index, axis=2, mode="linear"),
        )
        mixed = b.op("Transpose", self._mix(b, query, present, heads.sliding_window, w.dtype), perm=[0, 2, 1, 3])
        return b.op("Reshape", mixed, b.constant([0, 0, self.spec.heads * self.spec.head_dim])), present

    def _prepared(
        self, b: GraphBuilder, flat: ir.Value, w: Weights, heads: Heads, count: int, norm: str | None
    ) -> ir.Value:
        """Queries or keys, [batch, query, count * head_dim], to [batch, count, query, head_dim], normed and rotated."""
        how = self.spec.qk_norm
        if norm is not None and how is not None and how.over_all_heads:
            flat, norm = rms_norm(b, flat, w, norm, self.spec), None
        split = self._split(b, flat, count)
        if norm is not None and how is not None and how.after_rotary:
            return rms_norm(b, self._rotated(b, split, heads.rope), w, norm, self.spec)
        if norm is not None:
            split = rms_norm(b, split, w, norm, self.spec)
        return self._rotated(b, split, heads.rope)

    def _split(self, b: GraphBuilder, flat: ir.Value, count: int) -> ir.Value:
        """[batch, query, count * head_dim] to [batch, count, query, head_dim]."""
        split = b.op("Reshape", flat, b.constant([0, 0, count, self.spec.head_dim]))
        return b.op("Transpose", split, perm=[0, 2, 1, 3])

    def _rotated(self, b: GraphBuilder, x: ir.Value, rope: Rope | None) -> ir.Value:
        if rope is None:
            return x
        return b.op("RotaryEmbedding", x, *self.tables[rope], self.positions, **rotation(rope, self.spec.head_dim))

    def _mix(self, b: GraphBuilder, query: ir.Value, present: Cache, window: int | None, dtype: str) -> ir.Value:
        """Both [batch, heads, query, head_dim]."""
        scale, cap = self.spec.scales.attention, self.spec.scales.attention_softcap
        capped: dict[str, Any] = {"softcap": cap} if cap else {}
        if self.length is not None:
            inputs = (query, present.key, present.value, None, None, None, self.length)
            return b.op("Attention", *inputs, is_causal=1, scale=scale, **capped)
        # The scale goes into the query: left to the operator it would be spread over both factors, cache included.
        scaled = b.op("Mul", query, b.constant(scale, dtype))
        key, value = present.key, present.value
        return b.op("Attention", scaled, key, value, self.masks[window], is_causal=0, scale=1.0, **capped)


def rotation(rope: Rope, head_dim: int) -> dict[str, Any]:
    """The attributes of RotaryEmbedding for a rule, over heads of ``head_dim`` values."""
    interleaved = {"interleaved": 1} if rope.interleaved else {}
    return interleaved | ({} if rope.rotated == head_dim else {"rotary_embedding_dim": rope.rotated})


def _shared(
    b: GraphBuilder, spec: ModelSpec, capacity: int, dtype: str
) -> tuple[Mapping[Rope, Tables], ir.Value | None]:
    growth = query_growth(b, spec.rope, capacity, dtype) if spec.rope.growth else None
    return layer_tables(b, spec, capacity, dtype), growth


def _positions(b: GraphBuilder, given: Mapping[str, ir.Value]) -> ir.Value:
    """int64[batch, query]: where each new token stands."""
    query = b.op("Shape", given["token_ids"], start=1, end=2)
    steps = b.op("Range", b.constant(0), b.op("Squeeze", query, b.constant([0])), b.constant(1))
    return b.op("Add", b.op("Unsqueeze", given["write_index"], b.constant([1])), steps)

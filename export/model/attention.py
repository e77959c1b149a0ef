"""What attention is to a layer, and attention over a linear cache in standard operators."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.norm import rms_norm
from tandemrt.export.model.rotary import ramp_to, rotary_tables
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.spec import ModelSpec


@dataclass(frozen=True)
class Cache:
    """Keys and values of one layer, shaped as the contract says."""

    key: ir.Value
    value: ir.Value


@dataclass(frozen=True)
class Heads:
    """What the attention of one layer is made of.

    ``norms`` names the RMS norms of queries and keys, if the model has them. ``sliding_window`` is how many tokens a
    token sees, its own included; None is all of them.
    """

    layer: int
    query: Linear
    key: Linear
    value: Linear
    norms: tuple[str, str] | None
    sliding_window: int | None


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

    ``index``: int64[batch], tokens already cached. ``positions``: int64[batch, query]. ``cosine``, ``sine``:
    [capacity, head_dim // 2]. One of ``length`` (int64[batch], cached plus new tokens) and ``mask``
    (bool[batch, 1, query, capacity]) says which cache entries a token sees. A row is never longer than the model's
    sliding window.
    """

    spec: ModelSpec
    index: ir.Value
    positions: ir.Value
    cosine: ir.Value
    sine: ir.Value
    length: ir.Value | None = None
    mask: ir.Value | None = None

    @classmethod
    def by_length(
        cls, b: GraphBuilder, spec: ModelSpec, given: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> "LinearCacheAttention":
        """Tell the operator how many entries count; it aligns causality to the end of each row's length."""
        positions = _positions(b, given)
        # Padded query rows count as well. Taken from the positions rather than from the shape: what depends on a
        # shape is computed on the host, and the index would have to travel there.
        length = b.op("Add", b.op("ReduceMax", positions, b.constant([1]), keepdims=0), b.constant(1))
        tables = rotary_tables(b, spec.rope, capacity, dtype)
        return cls(spec, given["write_index"], positions, *tables, length=length)

    @classmethod
    def by_mask(
        cls, b: GraphBuilder, spec: ModelSpec, given: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> "LinearCacheAttention":
        """Give the operator a boolean mask."""
        positions = _positions(b, given)
        seen = b.op("LessOrEqual", ramp_to(b, capacity), b.op("Unsqueeze", positions, b.constant([2])))
        mask = b.op("Unsqueeze", seen, b.constant([1]))
        tables = rotary_tables(b, spec.rope, capacity, dtype)
        return cls(spec, given["write_index"], positions, *tables, mask=mask)

    def __call__(self, b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> tuple[ir.Value, Cache]:
        q_norm, k_norm = heads.norms or (None, None)
        query = self._rotated(b, self._split(b, heads.query(b, x, w), w, self.spec.heads, q_norm))
        key = self._rotated(b, self._split(b, heads.key(b, x, w), w, self.spec.kv_heads, k_norm))
        value = self._split(b, heads.value(b, x, w), w, self.spec.kv_heads, None)
        present = Cache(
            b.op("TensorScatter", past.key, key, self.index, axis=2, mode="linear"),
            b.op("TensorScatter", past.value, value, self.index, axis=2, mode="linear"),
        )
        mixed = b.op("Transpose", self._mix(b, query, present, w.dtype), perm=[0, 2, 1, 3])
        return b.op("Reshape", mixed, b.constant([0, 0, self.spec.heads * self.spec.head_dim])), present

    def _split(self, b: GraphBuilder, flat: ir.Value, w: Weights, count: int, norm: str | None) -> ir.Value:
        """[batch, query, count * head_dim] to [batch, count, query, head_dim], normed per head."""
        split = b.op("Reshape", flat, b.constant([0, 0, count, self.spec.head_dim]))
        if norm is not None:
            split = rms_norm(b, split, w, norm, self.spec.norm_eps)
        return b.op("Transpose", split, perm=[0, 2, 1, 3])

    def _rotated(self, b: GraphBuilder, x: ir.Value) -> ir.Value:
        return b.op("RotaryEmbedding", x, self.cosine, self.sine, self.positions)

    def _mix(self, b: GraphBuilder, query: ir.Value, present: Cache, dtype: str) -> ir.Value:
        """Both [batch, heads, query, head_dim]."""
        scale = 1 / math.sqrt(self.spec.head_dim)
        if self.mask is None:
            inputs = (query, present.key, present.value, None, None, None, self.length)
            return b.op("Attention", *inputs, is_causal=1, scale=scale)
        # The scale goes into the query: left to the operator it would be spread over both factors, cache included.
        scaled = b.op("Mul", query, b.constant(scale, dtype))
        return b.op("Attention", scaled, present.key, present.value, self.mask, is_causal=0, scale=1.0)


def _positions(b: GraphBuilder, given: Mapping[str, ir.Value]) -> ir.Value:
    """int64[batch, query]: where each new token stands."""
    query = b.op("Shape", given["token_ids"], start=1, end=2)
    steps = b.op("Range", b.constant(0), b.op("Squeeze", query, b.constant([0])), b.constant(1))
    return b.op("Add", b.op("Unsqueeze", given["write_index"], b.constant([1])), steps)

"""Attention of a block draft: what writes its context, and tokens of a block that see one another.

The operators of both caches are causal within a call. All tokens of a block see the same, the context and the whole
block, so they are given as the heads of one token: its last, behind which nothing is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.export.model.attention import Attention, Cache, Heads, rotation
from tandemrt.export.model.builder import LIBRARY, GraphBuilder, dims_of
from tandemrt.export.model.linear import packed
from tandemrt.export.model.norm import rms_norm
from tandemrt.export.model.rotary import Tables, rotary_tables
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec

Given = Mapping[str, ir.Value]


def by_layers(causal: Attention, mutual: Attention, which: Sequence[bool]) -> Attention:
    """``causal`` attention in the layers that ``which`` names, in the others ``mutual``."""

    def attend(b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> tuple[ir.Value, Cache]:
        return (causal if which[heads.layer] else mutual)(b, x, w, heads, past)

    return attend


@dataclass(frozen=True)
class Rotary:
    """Norms and rotary embedding of tokens that stand at ``positions``, int64 as RotaryEmbedding takes them."""

    spec: ModelSpec
    tables: Mapping[Rope | None, Tables]
    positions: ir.Value

    def turned(self, b: GraphBuilder, x: ir.Value, w: Weights, norm: str | None, rope: Rope | None) -> ir.Value:
        """``x`` [batch, heads, query, head_dim]."""
        if norm is not None:
            x = rms_norm(b, x, w, norm, self.spec)
        if rope is None:
            return x
        return b.op("RotaryEmbedding", x, *self.tables[rope], self.positions, **rotation(rope, self.spec.head_dim))


@dataclass(frozen=True)
class LinearBlock:
    """Over a cache of one row per slot, on a CPU, by GroupQueryAttention, which reads as far as the text goes.

    ``context`` writes keys and values of the states ``x`` [..., hidden] into a layer's cache; ``mutual`` is attention
    of whole blocks (Attention).
    """

    spec: ModelSpec
    block: int
    index: ir.Value
    rotary: Rotary

    @classmethod
    def of(
        cls, b: GraphBuilder, spec: ModelSpec, given: Given, *, block: int, capacity: int, dtype: str
    ) -> "LinearBlock":
        index = given["write_index"]
        query = b.op("Shape", given["features" if "features" in given else "token_ids"], start=1, end=2)
        steps = b.op("Range", b.constant(0), b.op("Squeeze", query, b.constant([0])), b.constant(1))
        positions = b.op("Add", b.op("Unsqueeze", index, b.constant([1])), steps)
        return cls(spec, block, index, Rotary(spec, tables_of(b, spec, capacity, dtype), positions))

    def context(self, b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> Cache:
        norm = None if heads.norms is None else heads.norms[1]
        pair = packed(heads.key, heads.value)(b, x, w)
        keys = self.spec.kv_heads * self.spec.head_dim
        key, value = b.ops("Split", pair, b.constant([keys, keys]), outputs=2, axis=2)
        return self._written(b, past, self.rotary.turned(b, self._split(b, key), w, norm, heads.rope), value)

    def mutual(self, b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> tuple[ir.Value, Cache]:
        spec, norms = self.spec, heads.norms or (None, None)
        keys, group = spec.kv_heads * spec.head_dim, spec.heads // spec.kv_heads
        qkv = packed(heads.query, heads.key, heads.value)(b, x, w)
        sizes = [spec.heads * spec.head_dim, keys, keys]
        query, key, value = b.ops("Split", qkv, b.constant(sizes), outputs=3, axis=2)
        query, key = (
            self.rotary.turned(b, self._split(b, flat), w, norm, heads.rope)
            for flat, norm in zip((query, key), norms, strict=True)
        )
        present = self._written(b, past, key, value)
        folded = b.op("Reshape", query, b.constant([0, 1, spec.heads * self.block * spec.head_dim]))
        batch = b.op("Shape", self.index)
        nothing = b.op("Expand", b.constant(0, w.dtype), b.op("Concat", batch, b.constant([0, keys]), axis=0))
        last = b.cast(b.op("Add", self.index, b.constant(self.block - 1)), "int32")
        most = b.op("Add", b.op("ReduceMax", last, keepdims=1), b.constant([1], "int32"))
        (mixed,) = b.custom(
            "GroupQueryAttention",
            *(folded, nothing, nothing, present.key, present.value, last, most),
            domain=LIBRARY,
            outputs=[(w.dtype, dims_of(folded))],
            num_heads=spec.heads * self.block,
            kv_num_heads=spec.kv_heads,
            scale=spec.scales.attention,
        )
        mixed = b.op("Reshape", mixed, b.constant([0, spec.kv_heads * group, self.block, spec.head_dim]))
        mixed = b.op("Transpose", mixed, perm=[0, 2, 1, 3])
        return b.op("Reshape", mixed, b.constant([0, self.block, spec.heads * spec.head_dim])), present

    def _written(self, b: GraphBuilder, past: Cache, key: ir.Value, value: ir.Value) -> Cache:
        value = self._split(b, value)
        return Cache(
            b.op("TensorScatter", past.key, key, self.index, axis=2, mode="linear"),
            b.op("TensorScatter", past.value, value, self.index, axis=2, mode="linear"),
        )

    def _split(self, b: GraphBuilder, flat: ir.Value) -> ir.Value:
        """[batch, query, count * head_dim] to [batch, count, query, head_dim]."""
        split = b.op("Reshape", flat, b.constant([0, 0, -1, self.spec.head_dim]))
        return b.op("Transpose", split, perm=[0, 2, 1, 3])


def tables_of(b: GraphBuilder, spec: ModelSpec, positions: int, dtype: str) -> dict[Rope | None, Tables]:
    """Cosine and sine of every position below ``positions``, by the rules of the layers."""
    used = dict.fromkeys(rope for layer in range(spec.layers) if (rope := spec.rope_of(layer)) is not None)
    return {rope: rotary_tables(b, rope, positions, dtype) for rope in used}

"""Attention of a block draft: what writes its context, and tokens of a block that see one another.

The operators of both caches are causal within a call. All tokens of a block see the same, the context and the whole
block, so they are given as the heads of one token: its last, behind which nothing is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.contract import BLOCK_SIZE, table_width
from tandemrt.engines.operators import SCHEMAS
from tandemrt.export.model.attention import Attention, Cache, Heads, rotation
from tandemrt.export.model.builder import LIBRARY, GraphBuilder, dims_of
from tandemrt.export.model.linear import packed
from tandemrt.export.model.norm import norm_weight, rms_norm
from tandemrt.export.model.rotary import Tables, rotary_tables, whole_head_tables
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators import DOMAIN

Given = Mapping[str, ir.Value]


def by_layers(causal: Attention, mutual: Attention, which: Sequence[bool]) -> Attention:
    """``causal`` attention in the layers that ``which`` names, in the others ``mutual``."""

    def attend(b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> tuple[ir.Value, Cache]:
        return (causal if which[heads.layer] else mutual)(b, x, w, heads, past)

    return attend


@dataclass(frozen=True)
class _Rotary:
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
    rotary: _Rotary

    @classmethod
    def of(
        cls, b: GraphBuilder, spec: ModelSpec, given: Given, *, block: int, capacity: int, dtype: str
    ) -> "LinearBlock":
        index = given["write_index"]
        query = b.op("Shape", given["features" if "features" in given else "token_ids"], start=1, end=2)
        steps = b.op("Range", b.constant(0), b.op("Squeeze", query, b.constant([0])), b.constant(1))
        positions = b.op("Add", b.op("Unsqueeze", index, b.constant([1])), steps)
        return cls(spec, block, index, _Rotary(spec, _tables(b, spec, capacity, dtype), positions))

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


@dataclass(frozen=True)
class PagedBlock:
    """Over blocks that all rows share, by ``window_attention``: one that writes, whose result nobody reads, and for a
    block one that attends. ``context`` and ``mutual`` as LinearBlock has them.

    ``place``: where the tokens of the call stand, by the names of the operator's inputs.
    """

    spec: ModelSpec
    block: int
    place: Given
    tables: Mapping[Rope | None, Tables]
    rotary: _Rotary | None

    @classmethod
    def of(
        cls, b: GraphBuilder, spec: ModelSpec, given: Given, *, block: int, capacity: int, dtype: str
    ) -> "PagedBlock":
        positions, pairs = table_width(capacity) * BLOCK_SIZE, spec.head_dim // 2
        rules = dict.fromkeys([*(spec.rope_of(layer) for layer in range(spec.layers)), None])
        tables = {rope: whole_head_tables(b, rope, pairs, positions, dtype) for rope in rules}
        names = [binding.name for binding in SCHEMAS["window_attention"].inputs if binding.name in given]
        place = {name: given[name] for name in names}
        if "token_ids" not in given:
            return cls(spec, block, place, tables, None)
        each = b.op("Unsqueeze", given["write_index"], b.constant([1]))
        at = b.op("Reshape", b.op("Add", each, b.constant(list(range(block)))), b.constant([-1, 1]))
        at.shape = ir.Shape(["tokens", 1])
        return cls(spec, block, place, tables, _Rotary(spec, _tables(b, spec, positions, dtype), at))

    def context(self, b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> Cache:
        keys = self.spec.kv_heads * self.spec.head_dim
        pair = packed(heads.key, heads.value)(b, x, w)
        key, value = b.ops("Split", pair, b.constant([keys, keys]), outputs=2, axis=1)
        norms = []
        if heads.norms is not None:
            weight = norm_weight(b, w, heads.norms[1], self.spec.head_dim, self.spec)
            norms = [b.cast(weight, w.dtype)] * 2
        _, present = self._operator(b, [key, key, value], past, self.place, self.tables[heads.rope], norms, w.dtype)
        return present

    def mutual(self, b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> tuple[ir.Value, Cache]:
        assert self.rotary is not None
        spec, block, norms = self.spec, self.block, heads.norms or (None, None)
        keys, group = spec.kv_heads * spec.head_dim, spec.heads // spec.kv_heads
        qkv = packed(heads.query, heads.key, heads.value)(b, x, w)
        sizes = [spec.heads * spec.head_dim, keys, keys]
        query, key, value = b.ops("Split", qkv, b.constant(sizes), outputs=3, axis=1)
        query, key = (
            b.op("Squeeze", self.rotary.turned(b, self._split(b, flat), w, norm, heads.rope), b.constant([2]))
            for flat, norm in zip((query, key), norms, strict=True)
        )
        key = _flat(b, key, "tokens", keys)
        still = self.tables[None]
        _, written = self._operator(b, [key, key, value], past, self.place, still, [], w.dtype)
        # [tokens, heads, head_dim] to the heads of one token a row: those of one KV head side by side.
        folded = b.op("Reshape", query, b.constant([-1, block, spec.kv_heads, group, spec.head_dim]))
        folded = b.op("Transpose", folded, perm=[0, 2, 1, 3, 4])
        folded = _flat(b, folded, "batch", spec.heads * block * spec.head_dim)
        last = [self._last(b, each, keys) for each in (key, value)]
        index = b.op("Add", self.place["write_index"], b.constant(block - 1))
        place = {**self.place, "write_index": index}
        mixed, present = self._operator(b, [folded, *last], written, place, still, [], w.dtype)
        mixed = b.op("Reshape", mixed, b.constant([-1, spec.kv_heads, block, group, spec.head_dim]))
        mixed = b.op("Transpose", mixed, perm=[0, 2, 1, 3, 4])
        return _flat(b, mixed, "tokens", spec.heads * spec.head_dim), present

    def _operator(
        self,
        b: GraphBuilder,
        parts: list[ir.Value],
        past: Cache,
        place: Given,
        tables: Tables,
        norms: list[ir.Value],
        dtype: str,
    ) -> tuple[ir.Value, Cache]:
        """``parts``: queries, keys and values, which say how many heads there are."""
        rows, width = dims_of(parts[0])
        qkv = b.op("Concat", *parts, axis=1)
        cache = (dtype, dims_of(past.key))
        mixed, key, value = b.custom(
            "window_attention",
            *(qkv, past.key, past.value, *place.values(), *tables, *norms),
            domain=DOMAIN,
            outputs=[(dtype, (rows, width)), cache, cache],
            heads=int(width) // self.spec.head_dim,
            kv_heads=self.spec.kv_heads,
            sliding_window=0,
            scale=self.spec.scales.attention,
            epsilon=self.spec.norm_eps,
        )
        return mixed, Cache(key, value)

    def _split(self, b: GraphBuilder, flat: ir.Value) -> ir.Value:
        """[tokens, count * head_dim] to [tokens, count, 1, head_dim]: each token is a text of its own."""
        return b.op("Reshape", flat, b.constant([0, -1, 1, self.spec.head_dim]))

    def _last(self, b: GraphBuilder, x: ir.Value, width: int) -> ir.Value:
        """[tokens, width] to [batch, width]: of each block the last token."""
        blocks = b.op("Reshape", x, b.constant([-1, self.block, width]))
        last = b.op("Gather", blocks, b.constant(self.block - 1), axis=1)
        last.shape = ir.Shape(["batch", width])
        return last


def _tables(b: GraphBuilder, spec: ModelSpec, positions: int, dtype: str) -> dict[Rope | None, Tables]:
    used = dict.fromkeys(rope for layer in range(spec.layers) if (rope := spec.rope_of(layer)) is not None)
    return {rope: rotary_tables(b, rope, positions, dtype) for rope in used}


def _flat(b: GraphBuilder, x: ir.Value, rows: str, width: int) -> ir.Value:
    flat = b.op("Reshape", x, b.constant([-1, width]))
    flat.shape = ir.Shape([rows, width])  # pieces are cut by the names
    return flat

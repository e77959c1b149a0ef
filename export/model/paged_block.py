"""Attention of a block draft over a paged cache, by the project's own operator; see block_attention.py."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.contract import BLOCK_SIZE, table_width
from tandemrt.engines.operators import SCHEMAS
from tandemrt.export.model.attention import Cache, Heads
from tandemrt.export.model.block_attention import Given, Rotary, tables_of
from tandemrt.export.model.builder import GraphBuilder, dims_of
from tandemrt.export.model.linear import packed
from tandemrt.export.model.norm import norm_weight
from tandemrt.export.model.rotary import Tables, whole_head_tables
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators import DOMAIN


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
    rotary: Rotary | None

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
        return cls(spec, block, place, tables, Rotary(spec, tables_of(b, spec, positions, dtype), at))

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


def _flat(b: GraphBuilder, x: ir.Value, rows: str, width: int) -> ir.Value:
    flat = b.op("Reshape", x, b.constant([-1, width]))
    flat.shape = ir.Shape([rows, width])  # pieces are cut by the names
    return flat

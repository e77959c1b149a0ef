"""Attention of a block draft over a paged cache by the project's own operator; see block_draft_attention.py."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.contract.contract import BLOCK_SIZE, table_width
from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.attention import AttentionWeights, LayerCache
from tandemrt.export.model.block_draft_attention import GraphInputs, NormAndRotary
from tandemrt.export.model.linear import merge_linears
from tandemrt.export.model.norm import norm_weight
from tandemrt.export.model.rotary import Rotary, Tables, layer_tables, whole_head_tables
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.constants import DOMAIN


@dataclass(frozen=True)
class PagedBlockAttention:
    """Attention of draft blocks over a paged cache, by ``window_attention``; see LinearCacheBlockAttention.

    ``context`` runs the operator only to write the cache; ``bidirectional`` runs it once to write and once to attend.
    ``place``: positions of the tokens of the call, by the operator's input names.
    """

    spec: ModelSpec
    block: int
    place: GraphInputs
    tables: Mapping[Rope | None, Tables]
    rotary: NormAndRotary | None

    @classmethod
    def of(
        cls, b: GraphBuilder, spec: ModelSpec, graph_inputs: GraphInputs, *, block: int, capacity: int, dtype: str
    ) -> "PagedBlockAttention":
        positions, pairs = table_width(capacity) * BLOCK_SIZE, spec.head_dim // 2
        rules = dict.fromkeys([*(spec.rope_of(layer) for layer in range(spec.layers)), None])
        tables = {rope: whole_head_tables(b, rope, pairs, positions, dtype) for rope in rules}
        names = [binding.name for binding in SCHEMAS["window_attention"].inputs if binding.name in graph_inputs]
        place = {name: graph_inputs[name] for name in names}
        if "token_ids" not in graph_inputs:
            return cls(spec, block, place, tables, None)
        each = b.op("Unsqueeze", graph_inputs["write_index"], b.constant([1]))
        at = b.op("Reshape", b.op("Add", each, b.constant(list(range(block)))), b.constant([-1, 1]))
        at.shape = ir.Shape(["tokens", 1])
        return cls(spec, block, place, tables, NormAndRotary(spec, Rotary(layer_tables(b, spec, positions, dtype), at)))

    def context(
        self, b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> LayerCache:
        keys = self.spec.kv_heads * self.spec.head_dim
        pair = merge_linears(attention.key, attention.value)(b, x, w)
        key, value = b.ops("Split", pair, b.constant([keys, keys]), outputs=2, axis=1)
        norms = []
        if attention.norms is not None:
            weight = norm_weight(b, w, attention.norms[1], self.spec.head_dim, self.spec)
            norms = [b.cast(weight, w.dtype)] * 2
        _, present = self._operator(b, [key, key, value], past, self.place, self.tables[attention.rope], norms, w.dtype)
        return present

    def bidirectional(
        self, b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> tuple[ir.Value, LayerCache]:
        assert self.rotary is not None
        spec, block, norms = self.spec, self.block, attention.norms or (None, None)
        keys, group = spec.kv_heads * spec.head_dim, spec.heads // spec.kv_heads
        qkv = merge_linears(attention.query, attention.key, attention.value)(b, x, w)
        sizes = [spec.heads * spec.head_dim, keys, keys]
        query, key, value = b.ops("Split", qkv, b.constant(sizes), outputs=3, axis=1)
        query, key = (
            b.op(
                "Squeeze",
                self.rotary.norm_and_rotate(b, self._split(b, flat), w, norm, attention.rope),
                b.constant([2]),
            )
            for flat, norm in zip((query, key), norms, strict=True)
        )
        key = _flat(b, key, "tokens", keys)
        unrotated = self.tables[None]
        _, written = self._operator(b, [key, key, value], past, self.place, unrotated, [], w.dtype)
        # [tokens, heads, head_dim] to the heads of one token per row; the heads of one KV head are adjacent.
        folded = b.op("Reshape", query, b.constant([-1, block, spec.kv_heads, group, spec.head_dim]))
        folded = b.op("Transpose", folded, perm=[0, 2, 1, 3, 4])
        folded = _flat(b, folded, "batch", spec.heads * block * spec.head_dim)
        last = [self._last(b, each, keys) for each in (key, value)]
        index = b.op("Add", self.place["write_index"], b.constant(block - 1))
        place = {**self.place, "write_index": index}
        mixed, present = self._operator(b, [folded, *last], written, place, unrotated, [], w.dtype)
        mixed = b.op("Reshape", mixed, b.constant([-1, spec.kv_heads, block, group, spec.head_dim]))
        mixed = b.op("Transpose", mixed, perm=[0, 2, 1, 3, 4])
        return _flat(b, mixed, "tokens", spec.heads * spec.head_dim), present

    def _operator(
        self,
        b: GraphBuilder,
        parts: list[ir.Value],
        past: LayerCache,
        place: GraphInputs,
        tables: Tables,
        norms: list[ir.Value],
        dtype: str,
    ) -> tuple[ir.Value, LayerCache]:
        """Append the operator for ``parts``: queries, keys and values. Their widths give the number of heads."""
        rows, width = dims_of(parts[0])
        qkv = b.op("Concat", *parts, axis=1)
        cache = (dtype, dims_of(past.key))
        mixed, key, value = b.custom(
            "window_attention",
            qkv,
            past.key,
            past.value,
            *place.values(),
            *tables,
            *norms,
            domain=DOMAIN,
            outputs=[(dtype, (rows, width)), cache, cache],
            heads=int(width) // self.spec.head_dim,
            kv_heads=self.spec.kv_heads,
            sliding_window=0,
            value_norm=0,
            scale=self.spec.scales.attention,
            epsilon=self.spec.norm_eps,
        )
        return mixed, LayerCache(key, value)

    def _split(self, b: GraphBuilder, flat: ir.Value) -> ir.Value:
        """Return [tokens, count * head_dim] as [tokens, count, 1, head_dim]: each token is a sequence of its own."""
        return b.op("Reshape", flat, b.constant([0, -1, 1, self.spec.head_dim]))

    def _last(self, b: GraphBuilder, x: ir.Value, width: int) -> ir.Value:
        """Return [batch, width] for ``x`` [tokens, width]: the last token of each draft block."""
        blocks = b.op("Reshape", x, b.constant([-1, self.block, width]))
        last = b.op("Gather", blocks, b.constant(self.block - 1), axis=1)
        last.shape = ir.Shape(["batch", width])
        return last


def _flat(b: GraphBuilder, x: ir.Value, rows: str, width: int) -> ir.Value:
    flat = b.op("Reshape", x, b.constant([-1, width]))
    flat.shape = ir.Shape([rows, width])  # values between subgraphs need named dimensions
    return flat

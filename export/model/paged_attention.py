"""Attention over a paged cache: ``window_attention`` of the project, in float8 ``float8_window_attention``.

Whatever runs between two such operators is captured into one CUDA graph, so nothing here may be computed on the host
from a shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.contract import BLOCK_SIZE, table_width
from tandemrt.engines.dtypes import FLOAT8
from tandemrt.engines.operators import SCHEMAS
from tandemrt.export.model.attention import Cache, Heads
from tandemrt.export.model.builder import DTYPES, GraphBuilder, dims_of
from tandemrt.export.model.linear import packed
from tandemrt.export.model.norm import norm_weight, rms_norm
from tandemrt.export.model.rotary import Tables, head_order, whole_head_tables
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators import DOMAIN


@dataclass(frozen=True)
class PagedAttention:
    """Attention over blocks that all rows share: one product for queries, keys and values, then the operator.

    ``place``: where the tokens of a packed call stand, by the names of the operator's inputs. ``tables``: cosine and
    sine of each rule, [positions, head_dim // 2]; that of None rotates nothing.
    """

    spec: ModelSpec
    place: Mapping[str, ir.Value]
    tables: Mapping[Rope | None, Tables]

    @classmethod
    def over_blocks(
        cls, b: GraphBuilder, spec: ModelSpec, given: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> "PagedAttention":
        """Tables for every position of a row's blocks, the last one to its end."""
        used = dict.fromkeys(spec.rope_of(layer) for layer in range(spec.layers))
        pairs, positions = spec.head_dim // 2, table_width(capacity) * BLOCK_SIZE
        tables = {rope: whole_head_tables(b, rope, pairs, positions, dtype) for rope in used}
        names = [binding.name for binding in SCHEMAS["window_attention"].inputs if binding.name in given]
        return cls(spec, {name: given[name] for name in names}, tables)

    def __call__(self, b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> tuple[ir.Value, Cache]:
        """Between ``qkv.<layer>`` and the result, ``mixed.<layer>``, stands nothing but the operator."""
        qkv = packed(heads.query, heads.key, heads.value)(b, x, w)
        norms: list[ir.Value] = []
        if heads.norms is not None and self.spec.qk_norm is not None and self.spec.qk_norm.over_all_heads:
            qkv = self._normed(b, qkv, w, heads.norms)
        elif heads.norms is not None:
            norms = [b.cast(norm_weight(b, w, n, self.spec.head_dim, self.spec), w.dtype) for n in heads.norms]
        qkv = self._paired(b, qkv, heads.rope)
        qkv.name = f"qkv.{heads.layer}"
        shape, cache = (*dims_of(qkv)[:-1], heads.query.width), dims_of(past.key)
        operator, kv_dtype, scales = "window_attention", w.dtype, {}
        if past.key.dtype == DTYPES[FLOAT8]:
            operator, kv_dtype = "float8_window_attention", FLOAT8
            scales = dict(zip(("key_scale", "value_scale"), w.cache_scales(heads.name), strict=True))
        mixed, key, value = b.custom(
            operator,
            *(qkv, past.key, past.value, *self.place.values(), *self.tables[heads.rope], *norms),
            domain=DOMAIN,
            outputs=[(w.dtype, shape), (kv_dtype, cache), (kv_dtype, cache)],
            heads=self.spec.heads,
            kv_heads=self.spec.kv_heads,
            sliding_window=heads.sliding_window or 0,
            scale=self.spec.scales.attention,
            epsilon=self.spec.norm_eps,
            **scales,
        )
        mixed.name = f"mixed.{heads.layer}"
        return mixed, Cache(key, value)

    def _normed(self, b: GraphBuilder, qkv: ir.Value, w: Weights, names: tuple[str, str]) -> ir.Value:
        """Queries and keys normed over all heads at once."""
        keys = self.spec.kv_heads * self.spec.head_dim
        sizes = [self.spec.heads * self.spec.head_dim, keys, keys]
        *parts, value = b.ops("Split", qkv, b.constant(sizes), outputs=3, axis=1)
        normed = [rms_norm(b, part, w, name, self.spec) for part, name in zip(parts, names, strict=True)]
        return b.op("Concat", *normed, value, axis=1)

    def _paired(self, b: GraphBuilder, qkv: ir.Value, rope: Rope | None) -> ir.Value:
        """Values of queries and keys in the order in which the operator rotates them: scores know no order."""
        head_dim, heads = self.spec.head_dim, self.spec.heads + self.spec.kv_heads
        order = head_order(rope, head_dim)
        if order == list(range(head_dim)):
            return qkv
        places = [head * head_dim + at for head in range(heads) for at in order]
        places += range(heads * head_dim, (heads + self.spec.kv_heads) * head_dim)
        return b.op("Gather", qkv, b.constant(places), axis=1)

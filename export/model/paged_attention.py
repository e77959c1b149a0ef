"""Attention over a paged cache: the operator ``window_attention`` of the project.

Whatever runs between two such operators is captured into one CUDA graph, so nothing here may be computed on the host
from a shape.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.contract import BLOCK_SIZE, table_width
from tandemrt.engines.operators import SCHEMAS
from tandemrt.export.model.attention import Cache, Heads
from tandemrt.export.model.builder import GraphBuilder, dims_of
from tandemrt.export.model.linear import packed
from tandemrt.export.model.rotary import rotary_tables
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators import DOMAIN


@dataclass(frozen=True)
class PagedAttention:
    """Attention over blocks that all rows share: one product for queries, keys and values, then the operator.

    ``place``: where the tokens of a packed call stand, by the names of the operator's inputs. ``cosine``, ``sine``:
    [positions, head_dim // 2].
    """

    spec: ModelSpec
    place: Mapping[str, ir.Value]
    cosine: ir.Value
    sine: ir.Value

    @classmethod
    def over_blocks(
        cls, b: GraphBuilder, spec: ModelSpec, given: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> "PagedAttention":
        """Tables for every position of a row's blocks, the last one to its end."""
        tables = rotary_tables(b, spec.rope, table_width(capacity) * BLOCK_SIZE, dtype)
        names = [binding.name for binding in SCHEMAS["window_attention"].inputs if binding.name in given]
        return cls(spec, {name: given[name] for name in names}, *tables)

    def __call__(self, b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> tuple[ir.Value, Cache]:
        """Between the product, ``qkv.<layer>``, and the result, ``mixed.<layer>``, stands nothing but the operator."""
        qkv = packed(heads.query, heads.key, heads.value)(b, x, w)
        qkv.name = f"qkv.{heads.layer}"
        norms = [w(f"{name}.weight", (self.spec.head_dim,)) for name in heads.norms or ()]
        shape, cache = (*dims_of(qkv)[:-1], heads.query.width), dims_of(past.key)
        mixed, key, value = b.custom(
            "window_attention",
            *(qkv, past.key, past.value, *self.place.values(), self.cosine, self.sine, *norms),
            domain=DOMAIN,
            outputs=[(w.dtype, shape), (w.dtype, cache), (w.dtype, cache)],
            heads=self.spec.heads,
            kv_heads=self.spec.kv_heads,
            sliding_window=heads.sliding_window or 0,
            scale=1 / math.sqrt(self.spec.head_dim),
            epsilon=self.spec.norm_eps,
        )
        mixed.name = f"mixed.{heads.layer}"
        return mixed, Cache(key, value)

"""Latent attention over a paged cache by the project's ``latent_attention``."""

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.engines.contract.contract import BLOCK_SIZE, table_width
from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.attention import AttentionWeights, LayerCache
from tandemrt.export.model.latent_attention import latent_outputs, latent_projections
from tandemrt.export.model.rotary import Tables, head_order, whole_head_tables
from tandemrt.export.read.latent import Latent
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.constants import DOMAIN


@dataclass(frozen=True)
class PagedLatentAttention:
    """Latent attention of all layers of a graph; the cache has no values.

    ``place``: positions of the tokens of a packed call, by the operator's input names. ``tables``: cosine and sine,
    [positions, rotated // 2].
    """

    spec: ModelSpec
    latent: Latent
    place: Mapping[str, ir.Value]
    tables: Tables

    @classmethod
    def over_blocks(
        cls,
        b: GraphBuilder,
        spec: ModelSpec,
        latent: Latent,
        graph_inputs: Mapping[str, ir.Value],
        *,
        capacity: int,
        dtype: str,
    ) -> "PagedLatentAttention":
        """Make tables for every position of a row's blocks, to the end of the last block."""
        rope = next(spec.rope_of(layer) for layer in range(spec.layers) if spec.has_attention(layer))  # of all of them
        tables = whole_head_tables(b, rope, latent.rotated // 2, table_width(capacity) * BLOCK_SIZE, dtype)
        names = [binding.name for binding in SCHEMAS["latent_attention"].inputs if binding.name in graph_inputs]
        return cls(spec, latent, {name: graph_inputs[name] for name in names}, tables)

    def __call__(
        self, b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> tuple[ir.Value, LayerCache]:
        """Append the attention; only its operator lies between ``query.<layer>`` and ``mixed.<layer>``."""
        spec, latent, tokens = self.spec, self.latent, dims_of(x)[0]
        query, key = latent_projections(b, x, w, spec, latent, attention.name)
        order = head_order(attention.rope, latent.rotated)
        if order != list(range(latent.rotated)):
            order += range(latent.rotated, latent.cached)
            key = b.op("Gather", key, b.constant(order), axis=1)
            every = [head * latent.cached + place for head in range(spec.heads) for place in order]
            query = b.op("Gather", query, b.constant(every), axis=1)
        query.name, key.name = f"query.{attention.layer}", f"key.{attention.layer}"
        mixed, cache = b.custom(
            "latent_attention",
            query,
            key,
            past.key,
            *self.place.values(),
            *self.tables,
            domain=DOMAIN,
            outputs=[(w.dtype, (tokens, spec.heads * latent.rank)), (w.dtype, dims_of(past.key))],
            heads=spec.heads,
            scale=spec.scales.attention,
        )
        mixed.name = f"mixed.{attention.layer}"
        vectors = b.op("Reshape", mixed, b.constant([0, spec.heads, latent.rank]))
        return latent_outputs(b, vectors, w, spec, latent, attention.name), LayerCache(cache, cache)

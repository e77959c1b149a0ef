"""Attention over a paged cache by the project's ``window_attention``, or ``float8_window_attention`` for a float8
cache.

A CUDA graph captures everything between two such operators, so no node here may be computed on the host from a shape.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from tandemrt.engines.contract.contract import BLOCK_SIZE, table_width
from tandemrt.engines.contract.dtypes import FLOAT8
from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.export.graph.builder import DTYPES, GraphBuilder, dims_of, without_trailing_none
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.attention import AttentionWeights, LayerCache, bounded, gated, gated_output
from tandemrt.export.model.linear import merge_linears
from tandemrt.export.model.norm import norm_weight, stored_norm
from tandemrt.export.model.rotary import Rotary, Tables, head_order, whole_head_tables
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.constants import DOMAIN


def optional_inputs(spec: ModelSpec) -> tuple[str, ...]:
    """Return the optional inputs of the operator that the nodes of a model have."""
    in_operator = spec.qk_norm is not None and not spec.qk_norm.over_all_heads and not spec.position_rows
    norms = ("q_norm", "k_norm") if in_operator else ()
    sinks, ends = ("sinks",) if spec.sinks else (), ("image_ends",) if any(spec.images_both_ways) else ()
    return *norms, *sinks, *ends


@dataclass(frozen=True)
class PagedAttention:
    """Attention over a paged cache: one merged matmul for queries, keys and values, then the operator.

    ``place``: positions of the tokens of a packed call, by the operator's input names. ``tables``: cosine and sine of
    each rotation rule and head size, [positions, head size // 2]; the tables for None rotate by angle 0. ``rotary``:
    norms and rotates queries and keys before the operator, where it cannot: by positions in time, height and width.
    ``image_ends``: of layers in which tokens of an image attend to later ones, and of others; None: there are none.
    """

    spec: ModelSpec
    place: Mapping[str, ir.Value]
    tables: Mapping[tuple[Rope | None, int], Tables]
    rotary: Rotary | None
    image_ends: tuple[ir.Value, ir.Value] | None = None

    @classmethod
    def over_blocks(
        cls,
        b: GraphBuilder,
        spec: ModelSpec,
        graph_inputs: Mapping[str, ir.Value],
        *,
        capacity: int,
        dtype: str,
        first_angle: int = 0,
    ) -> "PagedAttention":
        """Make tables for every position of a row's blocks, to the end of the last block.

        ``first_angle``: the position whose angles position 0 gets.
        """
        by_token, positions = "positions" in graph_inputs, table_width(capacity) * BLOCK_SIZE
        used = dict.fromkeys(
            (None if by_token else spec.rope_of(layer), spec.heads_of(layer).dim) for layer in range(spec.layers)
        )
        tables = {
            (rope, dim): whole_head_tables(b, rope, dim // 2, positions, dtype, first_angle) for rope, dim in used
        }
        names = [binding.name for binding in SCHEMAS["window_attention"].inputs if binding.name in graph_inputs]
        place = {name: graph_inputs[name] for name in names if name != "image_ends"}
        if not by_token:
            ends = graph_inputs.get("image_ends")
            both = None if ends is None else (ends, b.op("Mul", ends, b.constant(0)))
            return cls(spec, place, tables, None, both)
        each = {"positions": b.op("Unsqueeze", graph_inputs["positions"], b.constant([2]))}  # each token is a sequence
        unused = graph_inputs["write_index"]  # tables by token have no entries by position
        return cls(spec, place, tables, Rotary.of_call(b, spec, each, unused, capacity=positions, dtype=dtype))

    def __call__(
        self, b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> tuple[ir.Value, LayerCache]:
        """Append the attention; only its operator lies between ``qkv.<layer>`` and ``mixed.<layer>``, the result."""
        rotated = attention if self.rotary is None else replace(attention, rope=None, norms=None)
        qkv, gate = self._projected(b, x, w, rotated)
        qkv = bounded(b, qkv, self.spec, w.dtype)
        if self.rotary is not None:
            qkv, attention = self._normed_and_rotated(b, qkv, w, attention, self.rotary), rotated
        norms: list[ir.Value | None] = [None, None]
        heads = attention.heads
        if attention.norms is not None and self._norms_all_heads(attention):
            qkv = self._reorder_for_rotation(b, self._normed(b, qkv, w, attention.norms), attention.rope)
        elif attention.norms is not None:
            # A layer without keys of its own has no norm of keys, and the operator does not read it.
            names = (attention.norms[0],) * 2 if attention.reads_earlier else attention.norms
            norms = [self._norm_weight(b, w, name, heads.dim, attention.rope) for name in names]
        sinks = None if attention.sinks is None else b.cast(w.stored(attention.sinks, (heads.query,)), "float32")
        ends = self.image_ends and self.image_ends[not self.spec.images_both_ways[attention.layer]]
        qkv.name = f"qkv.{attention.layer}"
        shape, cache = (*dims_of(qkv)[:-1], heads.query * heads.dim), dims_of(past.key)
        operator, kv_dtype, scales = "window_attention", w.dtype, {}
        if past.key.dtype == DTYPES[FLOAT8]:
            operator, kv_dtype = "float8_window_attention", FLOAT8
            scales = dict(zip(("key_scale", "value_scale"), w.cache_scales(attention.name), strict=True))
        mixed, key, value = b.custom(
            operator,
            *without_trailing_none(
                [
                    qkv,
                    past.key,
                    past.value,
                    *self.place.values(),
                    *self.tables[attention.rope, heads.dim],
                    *norms,
                    sinks,
                    ends,
                ]
            ),
            domain=DOMAIN,
            outputs=[(w.dtype, shape), (kv_dtype, cache), (kv_dtype, cache)],
            heads=heads.query,
            kv_heads=heads.kv,
            sliding_window=attention.sliding_window or 0,
            value_norm=int(self.spec.variants.value_norm),
            scale=self.spec.scales.attention,
            epsilon=self.spec.norm_eps,
            **scales,
        )
        mixed.name = f"mixed.{attention.layer}"
        mixed = gated(b, gated_output(b, mixed, gate), x, w, attention, self.spec.variants.gate)
        return mixed, LayerCache(key, value)

    def _projected(
        self, b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights
    ) -> tuple[ir.Value, ir.Value | None]:
        """Return queries, keys and values in one tensor, and the logits of the output gate if the attention has one.

        Queries and keys have the order of the operator's rotary embedding, unless they are normed over all heads. A
        layer that reads an earlier one's cache has queries alone.
        """
        if attention.reads_earlier:
            merged = attention.query
        elif attention.values_are_keys:
            merged = merge_linears(attention.query, attention.key)
        else:
            merged = merge_linears(attention.query, attention.key, attention.value)
        size, all_queries = attention.heads.dim, attention.query.width
        order = list(range(size)) if self._norms_all_heads(attention) else head_order(attention.rope, size)
        step = 2 * size if self.spec.gated_attention else size  # each head's query is followed by its gate
        queries = [head + at for head in range(0, all_queries, step) for at in order]
        values = min(all_queries + attention.key.width, merged.width)
        keys = [head + at for head in range(all_queries, values, size) for at in order]
        first_value = all_queries if attention.values_are_keys and not attention.reads_earlier else values
        wanted = [*queries, *keys, *range(first_value, merged.width)]
        if self.spec.gated_attention:
            gates = [head + size + at for head in range(0, all_queries, step) for at in range(size)]
            qkv, gate = merged.outputs(b, x, w, wanted, gates)
            return qkv, gate
        if wanted == list(range(merged.width)):
            return merged(b, x, w), None
        return merged.outputs(b, x, w, wanted)[0], None

    def _normed_and_rotated(
        self, b: GraphBuilder, qkv: ir.Value, w: Weights, attention: AttentionWeights, rotary: Rotary
    ) -> ir.Value:
        """Norm and rotate queries and keys of ``qkv`` [tokens, width]."""
        keys = self.spec.kv_heads * self.spec.head_dim
        sizes = [self.spec.heads * self.spec.head_dim, keys, keys]
        *parts, value = b.ops("Split", qkv, b.constant(sizes), outputs=3, axis=1)
        joined = []
        for part, norm, width in zip(parts, attention.norms or (None, None), sizes, strict=False):
            split = b.op("Reshape", part, b.constant([0, -1, self.spec.head_dim]))
            if norm is not None:  # of three dimensions, as batch-invariant norms are
                split = stored_norm(b, split, w, norm, self.spec)
            rotated = rotary(b, b.op("Unsqueeze", split, b.constant([2])), attention.rope, self.spec.head_dim)
            joined.append(b.op("Reshape", rotated, b.constant([0, width])))
        result = b.op("Concat", *joined, value, axis=1)
        result.shape = ir.Shape(dims_of(qkv))  # values between subgraphs need named dimensions
        return result

    def _norms_all_heads(self, attention: AttentionWeights) -> bool:
        return attention.norms is not None and self.spec.qk_norm is not None and self.spec.qk_norm.over_all_heads

    def _normed(self, b: GraphBuilder, qkv: ir.Value, w: Weights, names: tuple[str, str]) -> ir.Value:
        """Norm queries and keys over all heads at once."""
        keys = self.spec.kv_heads * self.spec.head_dim
        sizes = [self.spec.heads * self.spec.head_dim, keys, keys]
        *parts, value = b.ops("Split", qkv, b.constant(sizes), outputs=3, axis=1)
        normed = [stored_norm(b, part, w, name, self.spec) for part, name in zip(parts, names, strict=True)]
        return b.op("Concat", *normed, value, axis=1)

    def _norm_weight(self, b: GraphBuilder, w: Weights, name: str, size: int, rope: Rope | None) -> ir.Value:
        """Return the weight of a norm per head of ``size`` values, in the order of the operator's rotary embedding."""
        weight = b.cast(norm_weight(b, w, name, size, self.spec), w.dtype)
        order = head_order(rope, size)
        return weight if order == list(range(size)) else b.op("Gather", weight, b.constant(order))

    def _reorder_for_rotation(self, b: GraphBuilder, qkv: ir.Value, rope: Rope | None) -> ir.Value:
        """Reorder the values of query and key heads for the operator's rotary embedding; scores do not change."""
        head_dim, heads = self.spec.head_dim, self.spec.heads + self.spec.kv_heads
        order = head_order(rope, head_dim)
        if order == list(range(head_dim)):
            return qkv
        places = [head * head_dim + at for head in range(heads) for at in order]
        places += range(heads * head_dim, (heads + self.spec.kv_heads) * head_dim)
        return b.op("Gather", qkv, b.constant(places), axis=1)

"""Attention on a CPU over a linear cache by ``decode_attention``, or by onnxruntime's GroupQueryAttention.

Both read only the valid entries of a row, whatever the capacity of the cache. GroupQueryAttention serves layers that
``decode_attention`` does not support. It supports one token of every row, or many tokens of one row, but not several
tokens of several rows. A draft window over a batch is then a loop over its tokens; each iteration serves all rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, GraphBuilder, dims_of, width_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.attention import (
    AttentionWeights,
    LayerCache,
    bounded,
    gated,
    gated_output,
    query_and_gate,
)
from tandemrt.export.model.latent_attention import latent_outputs, latent_projections
from tandemrt.export.model.linear import merge_linears
from tandemrt.export.model.norm import norm_by_head, stored_norm
from tandemrt.export.model.norm import normed as norm_by
from tandemrt.export.model.rotary import Rotary, query_scales
from tandemrt.export.model.row_padding import cut, is_padded, pad_as
from tandemrt.export.model.scale import scaled_by
from tandemrt.export.read.layer import Heads
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.functions.decode_attention import decode_attention
from tandemrt.plugins.onnxruntime.custom_operators import has_kernels
from tandemrt.plugins.operators.constants import DOMAIN

_TILE = 64  # tokens of a prompt that the operator computes at once for wide heads
_WIDE = 128  # values of a head; see GroupedAttention
_WIDEST = 1024  # values of a head that decode_attention supports

# Appends attention of rotated queries over a cache that has all new tokens.
_EachPart = Callable[[GraphBuilder, ir.Value, Weights, AttentionWeights, LayerCache], ir.Value]


@dataclass(frozen=True)
class _DraftWindow:
    """Arguments of GroupQueryAttention for each token of a draft window.

    ``seqlens_k``: int32[query, batch], the tokens of each row less one.
    ``total_sequence_length``: int32[query], the largest number of tokens of a row. ``count`` is query, a scalar.
    ``no_tokens``, by the width of the keys, [batch, 0, width]: new keys and values, none because they are cached
    already.
    """

    count: ir.Value
    seqlens_k: ir.Value
    total_sequence_length: ir.Value
    no_tokens: Mapping[int, ir.Value]


@dataclass(frozen=True)
class GroupedAttention:
    """Attention over a cache of one row per slot, with the same bits for any number of rows and tokens in a call.

    ``decode_attention`` has this property. GroupQueryAttention rounds a single token differently from several. It
    therefore always computes tokens that get logits one at a time, also those of a draft window, and prompt tokens
    always several at a time (``pad_prompt_to_even``). A call without rows that get logits is a prompt chunk. It also
    rounds a score of more than 128 products by the number of keys of a call. So prompts of wider heads are computed in
    tiles, each over the keys up to its end, wherever chunks begin and end.

    ``index``: int64[batch], tokens already cached. ``tokens``: int64[1], new tokens. ``seqlens_k``: int32[batch],
    tokens of a row, new ones included, less one. ``total_sequence_length``: int32[1], the largest number of tokens of a
    row. ``is_draft_window`` and ``is_prompt``: bool[], whether the call is a draft window, or a prompt chunk.
    ``query_scale``: [capacity, 1]. ``image_ends``: see contract.decoder; only ``decode_attention`` supports it.
    """

    spec: ModelSpec
    index: ir.Value
    tokens: ir.Value
    seqlens_k: ir.Value
    total_sequence_length: ir.Value
    rotary: Rotary
    query_scale: ir.Value | None
    is_draft_window: ir.Value
    is_prompt: ir.Value
    window: _DraftWindow
    image_ends: ir.Value | None

    @classmethod
    def in_place(
        cls, b: GraphBuilder, spec: ModelSpec, graph_inputs: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> "GroupedAttention":
        """Append the nodes that all layers share."""
        index, one = graph_inputs["write_index"], b.constant([1])
        batch, query = (b.op("Shape", graph_inputs["token_ids"], start=at, end=at + 1) for at in (0, 1))
        rows = b.op("Shape", graph_inputs["score_rows"], start=1, end=2)
        several = b.op("And", b.op("Greater", query, one), b.op("Greater", rows, b.constant([0])))
        count = b.op("Squeeze", query, b.constant([0]))
        steps = b.op("Range", b.constant(0), count, b.constant(1))
        positions = b.op("Add", b.op("Unsqueeze", index, one), steps)
        each = b.cast(b.op("Add", index, b.op("Unsqueeze", steps, one)), "int32")
        seqlens_k = b.cast(b.op("Sub", b.op("Add", index, query), one), "int32")
        widths = dict.fromkeys(of.kv * of.dim for of in map(spec.heads_of, range(spec.layers)))
        empty = {width: b.op("Concat", batch, b.constant([0, width]), axis=0) for width in widths}
        window = _DraftWindow(
            count,
            each,
            b.op("Add", b.op("ReduceMax", each, one, keepdims=0), b.constant(1, "int32")),
            {width: b.op("Expand", b.constant(0, dtype), shape) for width, shape in empty.items()},
        )
        total_sequence_length = b.op("Add", b.op("ReduceMax", seqlens_k, keepdims=1), b.constant([1], "int32"))
        rotary = Rotary.of_call(b, spec, graph_inputs, positions, capacity=capacity, dtype=dtype)
        query_scale = query_scales(b, spec, capacity, dtype)
        return cls(
            spec,
            index,
            query,
            seqlens_k,
            total_sequence_length,
            rotary,
            query_scale,
            b.op("Squeeze", several, b.constant([0])),
            b.op("Squeeze", b.op("Equal", rows, b.constant([0])), b.constant([0])),
            window,
            graph_inputs.get("image_ends"),
        )

    def __call__(
        self, b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> tuple[ir.Value, LayerCache]:
        gate, latent, variants = None, self.spec.latent, self.spec.variants
        scales_query = (attention.rope is None) == (self.spec.scales.query_beta != 0)
        if attention.reads_earlier:
            return self._over_cache(b, x, w, attention, past), past
        if latent is not None:
            query, key = latent_projections(b, x, w, self.spec, latent, attention.name)
            qkv = b.op("Concat", query, key, key, axis=2)
        elif self.spec.gated_attention:
            query, gate = query_and_gate(b, x, w, attention, self.spec)
            qkv = b.op("Concat", query, merge_linears(attention.key, attention.value)(b, x, w), axis=2)
        elif attention.values_are_keys:
            query, key = attention.query(b, x, w), attention.key(b, x, w)
            qkv = b.op("Concat", query, key, key, axis=2)
        elif variants.value_dim:
            value = scaled_by(b, attention.value(b, x, w), variants.value_scale, w.dtype)
            value = self._padded_values(b, value, attention.heads)
            qkv = b.op("Concat", attention.query(b, x, w), attention.key(b, x, w), value, axis=2)
        else:
            qkv = merge_linears(attention.query, attention.key, attention.value)(b, x, w)
            qkv = bounded(b, qkv, self.spec, w.dtype)
        if is_padded(x):
            qkv = cut(b, qkv, self.tokens, self.rotary.positions)
        if self.spec.qk_norm is not None and self.spec.qk_norm.after_rotary:
            qkv, attention = self._rotated_and_joined(b, qkv, attention), replace(attention, rope=None)
        if attention.norms is not None:
            qkv = self._normed(b, qkv, w, attention)
        if self.rotary.by_token and attention.rope is not None:
            qkv, attention = self._rotated_and_joined(b, qkv, attention), replace(attention, rope=None)
        if self.query_scale is not None and scales_query:
            query, key, value = self._parts(b, qkv, attention.heads)
            scaled = b.op("Mul", query, b.op("Gather", self.query_scale, self.rotary.positions))
            qkv = b.op("Concat", scaled, key, value, axis=2)
        if self._has_kernel(attention, w):
            mixed, key, value = self._by_kernel(b, qkv, w, attention, past)
        else:
            mixed, key, value = self._by_kind_of_call(
                b,
                attention.heads,
                lambda each_part: self._in_parts(b, qkv, w, attention, past, each_part),
                lambda: self._at_once(b, qkv, w, attention, past),
            )
        if is_padded(x):
            mixed = pad_as(b, mixed, self.tokens, x)
        if latent is not None:
            headed = b.op("Reshape", mixed, b.constant([0, 0, self.spec.heads, latent.cached]))
            _, vectors = b.ops("Split", headed, b.constant([latent.rotated, latent.rank]), outputs=2, axis=3)
            mixed = latent_outputs(b, vectors, w, self.spec, latent, attention.name)
        if variants.value_dim:
            mixed = self._cut_values(b, mixed, attention.heads, x)
        return gated(b, gated_output(b, mixed, gate), x, w, attention, variants.gate), LayerCache(key, value)

    def _over_cache(
        self, b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, cached: LayerCache
    ) -> ir.Value:
        """Append attention of a layer without keys over the cache of another one, which has the new tokens already."""
        heads, norms = attention.heads, attention.norms
        query = attention.query(b, x, w)
        if is_padded(x):
            query = cut(b, query, self.tokens, self.rotary.positions)
        if norms is not None:
            query = self._normed_heads(b, query, w, norms[0], heads.query, heads.dim)
        query = self.rotary(b, query, attention.rope, heads.dim, flat_heads=heads.query)
        rotated, counts = replace(attention, rope=None), (self.seqlens_k, self.total_sequence_length)
        (mixed,) = self._by_kind_of_call(
            b,
            heads,
            lambda each_part: (each_part(b, query, w, rotated, cached),),
            lambda: (self._of_cache(b, query, w, rotated, cached, *counts),),
        )
        return pad_as(b, mixed, self.tokens, x) if is_padded(x) else mixed

    def _normed(self, b: GraphBuilder, qkv: ir.Value, w: Weights, attention: AttentionWeights) -> ir.Value:
        """Norm queries and keys, per head or over all heads, and values if the model norms them."""
        heads = attention.heads
        query, key, value = self._parts(b, qkv, heads)
        query, key = (
            self._normed_heads(b, flat, w, norm, count, heads.dim)
            for flat, count, norm in zip((query, key), (heads.query, heads.kv), attention.norms or (), strict=True)
        )
        if self.spec.variants.value_norm:
            split = b.op("Reshape", value, b.constant([0, 0, heads.kv, heads.dim]))
            value = b.op(
                "Reshape", self._norm_without_weight(b, split, w.dtype), b.constant([0, 0, heads.kv * heads.dim])
            )
        return b.op("Concat", query, key, value, axis=2)

    def _normed_heads(
        self, b: GraphBuilder, flat: ir.Value, w: Weights, norm: str, count: int, head_dim: int
    ) -> ir.Value:
        """Norm ``flat`` [batch, query, count * head_dim], per head or over all heads."""
        how = self.spec.qk_norm
        if how is not None and how.over_all_heads:
            return stored_norm(b, flat, w, norm, self.spec)
        split = b.op("Reshape", flat, b.constant([0, 0, count, head_dim]))
        if how is not None and not how.stored:
            split = self._norm_without_weight(b, split, w.dtype)
        elif how is not None and how.by_head:
            split = norm_by_head(b, split, w, norm, count, self.spec, head_axis=2)
        else:
            split = stored_norm(b, split, w, norm, self.spec)
        return b.op("Reshape", split, b.constant([0, 0, count * head_dim]))

    def _norm_without_weight(self, b: GraphBuilder, x: ir.Value, dtype: str) -> ir.Value:
        return norm_by(b, x, b.constant([1.0] * width_of(x), dtype), dtype, self.spec.norm_eps)

    def _rotated_pair(
        self, b: GraphBuilder, query: ir.Value, key: ir.Value, attention: AttentionWeights
    ) -> tuple[ir.Value, ir.Value]:
        heads, rope = attention.heads, attention.rope
        return (
            self.rotary(b, query, rope, heads.dim, flat_heads=heads.query),
            self.rotary(b, key, rope, heads.dim, flat_heads=heads.kv),
        )

    def _rotated_and_joined(self, b: GraphBuilder, qkv: ir.Value, attention: AttentionWeights) -> ir.Value:
        query, key, value = self._parts(b, qkv, attention.heads)
        return b.op("Concat", *self._rotated_pair(b, query, key, attention), value, axis=2)

    def _by_kind_of_call(
        self,
        b: GraphBuilder,
        heads: Heads,
        in_parts: Callable[[_EachPart], Sequence[ir.Value]],
        at_once: Callable[[], Sequence[ir.Value]],
    ) -> tuple[ir.Value, ...]:
        """Append a draft window token by token, a prompt of wide heads in tiles, and any other call at once."""

        def window_or_at_once() -> tuple[ir.Value, ...]:
            return b.branch(self.is_draft_window, lambda: in_parts(self._each_token), at_once)

        if heads.dim <= _WIDE:
            return window_or_at_once()
        return b.branch(self.is_prompt, lambda: in_parts(self._each_tile), window_or_at_once)

    def _at_once(
        self, b: GraphBuilder, qkv: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Append one operator that rotates, writes the cache and attends; one token per row, or several of one."""
        cache = (w.dtype, dims_of(past.key))
        tables = (None, None) if attention.rope is None else self.rotary.tables[attention.rope]
        return self._operator(
            b,
            qkv,
            None,
            None,
            past.key,
            past.value,
            self.seqlens_k,
            self.total_sequence_length,
            *tables,
            outputs=[(w.dtype, (*dims_of(qkv)[:-1], attention.heads.query * attention.heads.dim)), cache, cache],
            attention=attention,
            w=w,
        )

    def _has_kernel(self, attention: AttentionWeights, w: Weights) -> bool:
        """Whether ``decode_attention`` supports the layer, and a C compiler builds its kernel here."""
        plain = attention.sinks is None and not self.spec.scales.attention_softcap
        halves = attention.rope is None or not attention.rope.interleaved
        return plain and halves and w.dtype == "float32" and attention.heads.dim <= _WIDEST and has_kernels()

    def _by_kernel(
        self, b: GraphBuilder, qkv: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> tuple[ir.Value, ...]:
        """Append the operator of the project: it rotates, writes the cache and attends."""
        ends = self.image_ends
        if ends is not None and not self.spec.images_both_ways[attention.layer]:
            ends = b.op("Mul", ends, b.constant(0))  # a token sees no later ones
        optional = () if ends is None else ("ends",)
        b.add_function("decode_attention", partial(decode_attention, optional))
        cache = (w.dtype, dims_of(past.key))
        no_table = None
        if attention.rope is None:  # a row of no values per position: the operator in standard operators gathers them
            no_table = b.constant(np.zeros((int(dims_of(past.key)[2]), 0)), w.dtype)
        return b.custom(
            "decode_attention",
            qkv,
            past.key,
            past.value,
            self.index,
            *((no_table, no_table) if attention.rope is None else self.rotary.tables[attention.rope]),
            *(() if ends is None else (ends,)),
            domain=DOMAIN,
            outputs=[(w.dtype, (*dims_of(qkv)[:-1], attention.heads.query * attention.heads.dim)), cache, cache],
            heads=attention.heads.query,
            sliding_window=attention.sliding_window or 0,
            scale=self.spec.scales.attention,
        )

    def _in_parts(
        self,
        b: GraphBuilder,
        qkv: ir.Value,
        w: Weights,
        attention: AttentionWeights,
        past: LayerCache,
        each_part: _EachPart,
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Write all tokens into the cache, then attend by ``each_part``: a draft window of every row, or a prompt."""
        query, key, value = self._parts(b, qkv, attention.heads)
        query, key = self._rotated_pair(b, query, key, attention)
        key, value = (
            b.op("TensorScatter", cached, self._headed(b, flat, attention.heads), self.index, axis=2, mode="linear")
            for cached, flat in ((past.key, key), (past.value, value))
        )
        return each_part(b, query, w, replace(attention, rope=None), LayerCache(key, value)), key, value

    def _each_token(
        self, b: GraphBuilder, query: ir.Value, w: Weights, attention: AttentionWeights, present: LayerCache
    ) -> ir.Value:
        """Append attention of rotated queries over a cache with all new tokens, for one token per row at a time."""

        def step(at: ir.Value) -> ir.Value:
            token = b.op("Gather", query, b.op("Unsqueeze", at, b.constant([0])), axis=1)
            counts = (b.op("Gather", each, at) for each in (self.window.seqlens_k, self.window.total_sequence_length))
            return b.op("Squeeze", self._of_cache(b, token, w, attention, present, *counts), b.constant([1]))

        mixed = b.op("Transpose", b.loop(self.window.count, step), perm=[1, 0, 2])
        mixed.shape = ir.Shape(dims_of(query))  # the loop has one step per token of the draft window
        return mixed

    def _each_tile(
        self, b: GraphBuilder, query: ir.Value, w: Weights, attention: AttentionWeights, present: LayerCache
    ) -> ir.Value:
        """Append attention of a prompt's rotated queries over a cache with all new tokens, for one tile at a time.

        Tiles begin at multiples of their size in the text. Queries of zeros fill the first and the last one.
        """
        tile, zero, one = b.constant([_TILE]), b.constant([0]), b.constant([1])
        before = b.op("Mod", self.index, tile)
        begin, filled = b.op("Sub", self.index, before), b.op("Add", before, self.tokens)
        count = b.op("Div", b.op("Add", filled, b.constant([_TILE - 1])), tile)
        after = b.op("Sub", b.op("Mul", count, tile), filled)
        padded = b.op("Pad", query, b.op("Concat", zero, before, zero, zero, after, zero, axis=0))
        width = attention.heads.query * attention.heads.dim
        tiles = b.op("Reshape", padded, b.constant([-1, 1, _TILE, width]))
        tiles.shape = ir.Shape(["tiles", 1, _TILE, width])
        cache = LayerCache(self._whole_tiles(b, present.key), self._whole_tiles(b, present.value))

        def step(at: ir.Value) -> ir.Value:
            end = b.op("Add", begin, b.op("Mul", b.op("Add", b.op("Unsqueeze", at, zero), one), tile))
            counts = b.cast(b.op("Sub", end, one), "int32"), b.cast(end, "int32")
            return self._of_cache(b, b.op("Gather", tiles, at), w, attention, cache, *counts)

        mixed = b.op("Reshape", b.loop(b.op("Squeeze", count, zero), step), b.constant([1, -1, width]))
        mixed = b.op("Slice", mixed, before, filled, one)
        mixed.shape = ir.Shape(dims_of(query))
        return mixed

    def _whole_tiles(self, b: GraphBuilder, cached: ir.Value) -> ir.Value:
        """Return keys or values [batch, heads, capacity, dim] with zeros up to the end of the last tile."""
        batch, heads, capacity, dim = dims_of(cached)
        assert isinstance(capacity, int)
        if not (missing := -capacity % _TILE):
            return cached
        padded = b.op("Pad", cached, b.constant([0, 0, 0, 0, 0, 0, missing, 0]))
        padded.shape = ir.Shape([batch, heads, capacity + missing, dim])
        return padded

    def _of_cache(
        self,
        b: GraphBuilder,
        query: ir.Value,
        w: Weights,
        attention: AttentionWeights,
        present: LayerCache,
        seqlens_k: ir.Value,
        total_sequence_length: ir.Value,
    ) -> ir.Value:
        """Append the operator for rotated queries over a cache with all new tokens."""
        no_tokens = self.window.no_tokens[attention.heads.kv * attention.heads.dim]
        inputs = (query, no_tokens, no_tokens, present.key, present.value, seqlens_k, total_sequence_length, None, None)
        (mixed,) = self._operator(b, *inputs, outputs=[(w.dtype, dims_of(query))], attention=attention, w=w)
        return mixed

    def _operator(
        self,
        b: GraphBuilder,
        *inputs: ir.Value | None,
        outputs: list[tuple[str, tuple[int | str, ...]]],
        attention: AttentionWeights,
        w: Weights,
    ) -> tuple[ir.Value, ...]:
        """Append GroupQueryAttention; ``inputs`` are its first nine inputs."""
        rope = attention.rope
        sinks = () if attention.sinks is None else (None, None, w(attention.sinks, (attention.heads.query,)))
        return b.custom(
            "GroupQueryAttention",
            *inputs,
            *sinks,
            domain=LIBRARY,
            outputs=outputs,
            num_heads=attention.heads.query,
            kv_num_heads=attention.heads.kv,
            do_rotary=int(rope is not None),
            rotary_interleaved=int(rope is not None and rope.interleaved),
            scale=self.spec.scales.attention,
            softcap=self.spec.scales.attention_softcap,
            local_window_size=attention.sliding_window or -1,
        )

    def _padded_values(self, b: GraphBuilder, flat: ir.Value, heads: Heads) -> ir.Value:
        """Return values [batch, query, heads.kv * value_dim] with zeros after them, as the cache holds them."""
        size = self.spec.variants.value_dim
        split = b.op("Reshape", flat, b.constant([0, 0, heads.kv, size]))
        split = b.op("Pad", split, b.constant([0, 0, 0, 0, 0, 0, 0, heads.dim - size]))
        return b.op("Reshape", split, b.constant([0, 0, heads.kv * heads.dim]))

    def _cut_values(self, b: GraphBuilder, mixed: ir.Value, heads: Heads, x: ir.Value) -> ir.Value:
        """Return ``mixed`` [batch, query, heads.query * heads.dim] without the zeros after values."""
        size = self.spec.variants.value_dim
        split = b.op("Reshape", mixed, b.constant([0, 0, heads.query, heads.dim]))
        split = b.op("Slice", split, b.constant([0]), b.constant([size]), b.constant([3]))
        values = b.op("Reshape", split, b.constant([0, 0, heads.query * size]))
        values.shape = ir.Shape([*dims_of(x)[:2], heads.query * size])  # a Reshape loses the name of padded tokens
        return values

    def _parts(self, b: GraphBuilder, qkv: ir.Value, heads: Heads) -> tuple[ir.Value, ...]:
        keys = heads.kv * heads.dim
        return b.ops("Split", qkv, b.constant([heads.query * heads.dim, keys, keys]), outputs=3, axis=2)

    def _headed(self, b: GraphBuilder, flat: ir.Value, heads: Heads) -> ir.Value:
        """Return [batch, query, heads.kv * heads.dim] as [batch, heads.kv, query, heads.dim]."""
        split = b.op("Reshape", flat, b.constant([0, 0, heads.kv, heads.dim]))
        return b.op("Transpose", split, perm=[0, 2, 1, 3])

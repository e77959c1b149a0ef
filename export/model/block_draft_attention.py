"""Attention of a block draft over a linear cache: write the context, and attend bidirectionally within a draft block.

The attention operators are causal within a call, but all tokens of a draft block attend to the same entries: the
context and the full block. The query heads of all its tokens are therefore passed as heads of one token, the last one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, GraphBuilder, dims_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.attention import Attention, AttentionWeights, LayerCache
from tandemrt.export.model.linear import merge_linears
from tandemrt.export.model.norm import stored_norm
from tandemrt.export.model.rotary import Rotary, call_positions, layer_tables
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec

GraphInputs = Mapping[str, ir.Value]


def attention_by_layer(causal: Attention, bidirectional: Attention, which: Sequence[bool]) -> Attention:
    """Return attention that is ``causal`` in the layers that ``which`` marks and ``bidirectional`` in the others."""

    def attend(
        b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> tuple[ir.Value, LayerCache]:
        return (causal if which[attention.layer] else bidirectional)(b, x, w, attention, past)

    return attend


@dataclass(frozen=True)
class NormAndRotary:
    """Norm and rotary embedding of queries and keys."""

    spec: ModelSpec
    rotary: Rotary

    def norm_and_rotate(
        self, b: GraphBuilder, x: ir.Value, w: Weights, norm: str | None, rope: Rope | None
    ) -> ir.Value:
        """Return ``x`` [batch, heads, query, head_dim] normed and rotated."""
        if norm is not None:
            x = stored_norm(b, x, w, norm, self.spec)
        return self.rotary(b, x, rope, self.spec.head_dim)


@dataclass(frozen=True)
class LinearCacheBlockAttention:
    """Attention of draft blocks over a cache of one row per slot, on a CPU, by GroupQueryAttention.

    ``context`` writes keys and values of the states ``x`` [..., hidden] into a layer's cache. ``bidirectional``
    implements Attention: all tokens of a draft block attend to the context and to the full block. ``block`` is the
    number of tokens of a draft block.
    """

    spec: ModelSpec
    block: int
    index: ir.Value
    rotary: NormAndRotary

    @classmethod
    def of(
        cls, b: GraphBuilder, spec: ModelSpec, graph_inputs: GraphInputs, *, block: int, capacity: int, dtype: str
    ) -> "LinearCacheBlockAttention":
        index = graph_inputs["write_index"]
        positions = call_positions(b, index, graph_inputs["features" if "features" in graph_inputs else "token_ids"])
        rotary = Rotary(layer_tables(b, spec, capacity, dtype), positions)
        return cls(spec, block, index, NormAndRotary(spec, rotary))

    def context(
        self, b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> LayerCache:
        norm = None if attention.norms is None else attention.norms[1]
        pair = merge_linears(attention.key, attention.value)(b, x, w)
        keys = self.spec.kv_heads * self.spec.head_dim
        key, value = b.ops("Split", pair, b.constant([keys, keys]), outputs=2, axis=2)
        return self._written(
            b, past, self.rotary.norm_and_rotate(b, self._split(b, key), w, norm, attention.rope), value
        )

    def bidirectional(
        self, b: GraphBuilder, x: ir.Value, w: Weights, attention: AttentionWeights, past: LayerCache
    ) -> tuple[ir.Value, LayerCache]:
        spec, norms = self.spec, attention.norms or (None, None)
        keys, group = spec.kv_heads * spec.head_dim, spec.heads // spec.kv_heads
        qkv = merge_linears(attention.query, attention.key, attention.value)(b, x, w)
        sizes = [spec.heads * spec.head_dim, keys, keys]
        query, key, value = b.ops("Split", qkv, b.constant(sizes), outputs=3, axis=2)
        query, key = (
            self.rotary.norm_and_rotate(b, self._split(b, flat), w, norm, attention.rope)
            for flat, norm in zip((query, key), norms, strict=True)
        )
        present = self._written(b, past, key, value)
        folded = b.op("Reshape", query, b.constant([0, 1, spec.heads * self.block * spec.head_dim]))
        batch = b.op("Shape", self.index)
        no_tokens = b.op("Expand", b.constant(0, w.dtype), b.op("Concat", batch, b.constant([0, keys]), axis=0))
        seqlens_k = b.cast(b.op("Add", self.index, b.constant(self.block - 1)), "int32")
        total_sequence_length = b.op("Add", b.op("ReduceMax", seqlens_k, keepdims=1), b.constant([1], "int32"))
        (mixed,) = b.custom(
            "GroupQueryAttention",
            folded,
            no_tokens,
            no_tokens,
            present.key,
            present.value,
            seqlens_k,
            total_sequence_length,
            domain=LIBRARY,
            outputs=[(w.dtype, dims_of(folded))],
            num_heads=spec.heads * self.block,
            kv_num_heads=spec.kv_heads,
            scale=spec.scales.attention,
        )
        mixed = b.op("Reshape", mixed, b.constant([0, spec.kv_heads * group, self.block, spec.head_dim]))
        mixed = b.op("Transpose", mixed, perm=[0, 2, 1, 3])
        return b.op("Reshape", mixed, b.constant([0, self.block, spec.heads * spec.head_dim])), present

    def _written(self, b: GraphBuilder, past: LayerCache, key: ir.Value, value: ir.Value) -> LayerCache:
        value = self._split(b, value)
        return LayerCache(
            b.op("TensorScatter", past.key, key, self.index, axis=2, mode="linear"),
            b.op("TensorScatter", past.value, value, self.index, axis=2, mode="linear"),
        )

    def _split(self, b: GraphBuilder, flat: ir.Value) -> ir.Value:
        """Return [batch, query, count * head_dim] as [batch, count, query, head_dim]."""
        split = b.op("Reshape", flat, b.constant([0, 0, -1, self.spec.head_dim]))
        return b.op("Transpose", split, perm=[0, 2, 1, 3])

"""Attention on a CPU: onnxruntime's GroupQueryAttention, which costs what the text is long, over a linear cache.

The operator reads no further than a row's own text, whatever the cache could hold. It takes one token of every row, or
many tokens of one row, but no window over a batch: that is a loop over the window's tokens, one of every row at a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import onnx_ir as ir

from tandemrt.export.model.attention import Cache, Heads, rotation
from tandemrt.export.model.builder import LIBRARY, GraphBuilder, dims_of
from tandemrt.export.model.linear import packed
from tandemrt.export.model.norm import rms_norm
from tandemrt.export.model.rotary import Tables, layer_tables, query_growth
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.rope import Rope
from tandemrt.export.read.spec import ModelSpec

HEAD_DIM_STEP = 16  # the operator's rotary embedding takes heads of a multiple of this


@dataclass(frozen=True)
class _Window:
    """A window, token by token: the ``positions`` int64[batch, query] of its tokens, and for each of them, in the
    operator's words, the row's tokens less one, int32[query, batch], and the most tokens of any row, int32[query].

    ``count`` is query, a scalar; ``nothing`` [batch, 0, width of the keys] says that keys and values are cached.
    """

    count: ir.Value
    positions: ir.Value
    last: ir.Value
    most: ir.Value
    nothing: ir.Value


@dataclass(frozen=True)
class GroupedAttention:
    """Attention over a cache of one row per slot, the same bits however many rows and tokens are computed together.

    The operator's kernel rounds one token in another way than several. So a token that is scored is always computed
    as one, those of a window too, and a prompt's are always computed as several (``even_prompt``); the graph knows a
    prompt by its scoring no row.

    ``index``: int64[batch], tokens already cached. ``last``: int32[batch], a row's tokens, the new ones included, less
    one; ``most``: int32[1], the most tokens of any row. ``windowed``: bool[], whether the call is a window.
    ``tables``: cosine and sine of each rule, [capacity, rotated // 2]. ``growth``: [capacity, 1].
    """

    spec: ModelSpec
    index: ir.Value
    last: ir.Value
    most: ir.Value
    tables: Mapping[Rope, Tables]
    growth: ir.Value | None
    windowed: ir.Value
    window: _Window

    @classmethod
    def in_place(
        cls, b: GraphBuilder, spec: ModelSpec, given: Mapping[str, ir.Value], *, capacity: int, dtype: str
    ) -> "GroupedAttention":
        """What all layers share."""
        index, one = given["write_index"], b.constant([1])
        batch, query = (b.op("Shape", given["token_ids"], start=at, end=at + 1) for at in (0, 1))
        rows = b.op("Shape", given["score_rows"], start=1, end=2)
        several = b.op("And", b.op("Greater", query, one), b.op("Greater", rows, b.constant([0])))
        count = b.op("Squeeze", query, b.constant([0]))
        steps = b.op("Range", b.constant(0), count, b.constant(1))
        positions = b.op("Add", b.op("Unsqueeze", index, one), steps)
        each = b.cast(b.op("Add", index, b.op("Unsqueeze", steps, one)), "int32")
        last = b.cast(b.op("Sub", b.op("Add", index, query), one), "int32")
        empty = b.op("Concat", batch, b.constant([0, spec.kv_heads * spec.head_dim]), axis=0)
        window = _Window(
            count,
            positions,
            each,
            b.op("Add", b.op("ReduceMax", each, one, keepdims=0), b.constant(1, "int32")),
            b.op("Expand", b.constant(0, dtype), empty),
        )
        most = b.op("Add", b.op("ReduceMax", last, keepdims=1), b.constant([1], "int32"))
        tables = layer_tables(b, spec, capacity, dtype)
        growth = query_growth(b, spec.rope, capacity, dtype) if spec.rope.growth else None
        return cls(spec, index, last, most, tables, growth, b.op("Squeeze", several, b.constant([0])), window)

    def __call__(self, b: GraphBuilder, x: ir.Value, w: Weights, heads: Heads, past: Cache) -> tuple[ir.Value, Cache]:
        qkv = packed(heads.query, heads.key, heads.value)(b, x, w)
        if self.spec.qk_norm is not None and self.spec.qk_norm.after_rotary:
            qkv, heads = self._rotated_and_joined(b, qkv, heads), replace(heads, rope=None)
        if heads.norms is not None:
            qkv = self._normed(b, qkv, w, heads)
        if self.growth is not None:
            query, key, value = self._parts(b, qkv)
            grown = b.op("Mul", query, b.op("Gather", self.growth, self.window.positions))
            qkv = b.op("Concat", grown, key, value, axis=2)
        mixed, key, value = b.branch(
            self.windowed,
            lambda: self._token_by_token(b, qkv, w, heads, past),
            lambda: self._at_once(b, qkv, w, heads, past),
        )
        return mixed, Cache(key, value)

    def _normed(self, b: GraphBuilder, qkv: ir.Value, w: Weights, heads: Heads) -> ir.Value:
        """Queries and keys normed, each head by itself or all at once."""
        query, key, value = self._parts(b, qkv)
        parts = []
        for flat, count, norm in zip(
            (query, key), (self.spec.heads, self.spec.kv_heads), heads.norms or (), strict=True
        ):
            if self.spec.qk_norm is not None and self.spec.qk_norm.over_all_heads:
                parts.append(rms_norm(b, flat, w, norm, self.spec))
                continue
            split = b.op("Reshape", flat, b.constant([0, 0, count, self.spec.head_dim]))
            normed = rms_norm(b, split, w, norm, self.spec)
            parts.append(b.op("Reshape", normed, b.constant([0, 0, count * self.spec.head_dim])))
        return b.op("Concat", *parts, value, axis=2)

    def _rotated(self, b: GraphBuilder, query: ir.Value, key: ir.Value, rope: Rope | None) -> tuple[ir.Value, ir.Value]:
        if rope is None:
            return query, key
        query, key = (
            b.op(
                "RotaryEmbedding",
                *(flat, *self.tables[rope], self.window.positions),
                num_heads=count,
                **rotation(rope, self.spec.head_dim),
            )
            for flat, count in ((query, self.spec.heads), (key, self.spec.kv_heads))
        )
        return query, key

    def _rotated_and_joined(self, b: GraphBuilder, qkv: ir.Value, heads: Heads) -> ir.Value:
        query, key, value = self._parts(b, qkv)
        return b.op("Concat", *self._rotated(b, query, key, heads.rope), value, axis=2)

    def _at_once(
        self, b: GraphBuilder, qkv: ir.Value, w: Weights, heads: Heads, past: Cache
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """One token of every row, or several of one: rotary embedding, cache write and attention are one operator."""
        cache = (w.dtype, dims_of(past.key))
        tables = (None, None) if heads.rope is None else self.tables[heads.rope]
        return self._operator(
            b,
            *(qkv, None, None, past.key, past.value, self.last, self.most, *tables),
            outputs=[(w.dtype, (*dims_of(qkv)[:-1], heads.query.width)), cache, cache],
            heads=heads,
            w=w,
        )

    def _token_by_token(
        self, b: GraphBuilder, qkv: ir.Value, w: Weights, heads: Heads, past: Cache
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """A window of every row: all tokens into the cache, then the operator for one token of every row at a time."""
        query, key, value = self._parts(b, qkv)
        query, key = self._rotated(b, query, key, heads.rope)
        rotated = replace(heads, rope=None)
        present = [
            b.op("TensorScatter", cached, self._headed(b, flat), self.index, axis=2, mode="linear")
            for cached, flat in ((past.key, key), (past.value, value))
        ]

        def step(at: ir.Value) -> ir.Value:
            (mixed,) = self._operator(
                b,
                b.op("Gather", query, b.op("Unsqueeze", at, b.constant([0])), axis=1),
                *(self.window.nothing, self.window.nothing, *present),
                b.op("Gather", self.window.last, at),
                *(b.op("Gather", self.window.most, at), None, None),
                outputs=[(w.dtype, (dims_of(query)[0], 1, heads.query.width))],
                heads=rotated,
                w=w,
            )
            return b.op("Squeeze", mixed, b.constant([1]))

        mixed = b.op("Transpose", b.loop(self.window.count, step), perm=[1, 0, 2])
        mixed.shape = ir.Shape(dims_of(query))  # the loop's steps are the window's tokens
        return mixed, present[0], present[1]

    def _operator(
        self,
        b: GraphBuilder,
        *inputs: ir.Value | None,
        outputs: list[tuple[str, tuple[int | str, ...]]],
        heads: Heads,
        w: Weights,
    ) -> tuple[ir.Value, ...]:
        """The operator; ``inputs`` are its first nine."""
        rope = heads.rope
        sinks = () if heads.sinks is None else (None, None, w(heads.sinks, (self.spec.heads,)))
        return b.custom(
            "GroupQueryAttention",
            *inputs,
            *sinks,
            domain=LIBRARY,
            outputs=outputs,
            num_heads=self.spec.heads,
            kv_num_heads=self.spec.kv_heads,
            do_rotary=int(rope is not None),
            rotary_interleaved=int(rope is not None and rope.interleaved),
            scale=self.spec.scales.attention,
            softcap=self.spec.scales.attention_softcap,
            local_window_size=heads.sliding_window or -1,
        )

    def _parts(self, b: GraphBuilder, qkv: ir.Value) -> tuple[ir.Value, ...]:
        keys = self.spec.kv_heads * self.spec.head_dim
        sizes = [self.spec.heads * self.spec.head_dim, keys, keys]
        return b.ops("Split", qkv, b.constant(sizes), outputs=3, axis=2)

    def _headed(self, b: GraphBuilder, flat: ir.Value) -> ir.Value:
        """[batch, query, kv_heads * head_dim] to [batch, kv_heads, query, head_dim]."""
        split = b.op("Reshape", flat, b.constant([0, 0, self.spec.kv_heads, self.spec.head_dim]))
        return b.op("Transpose", split, perm=[0, 2, 1, 3])

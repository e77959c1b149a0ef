"""``window_attention`` in standard operators."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, INT64, Body, BodyValue

_ZERO, _ONE, _ALL = (np.array([each], np.int64) for each in (0, 1, -1))


def window_attention(present: Collection[str] = (), *, float8: bool = False) -> ir.Function:
    """Return the function; inputs and outputs as in the reference. ``present``: the optional inputs that nodes have.

    With ``float8`` the caches are float8, the attributes key_scale and value_scale (float) exist, and the function is
    ``float8_window_attention``. The other attributes are all required: heads, kv_heads, sliding_window, value_norm
    (int), scale, epsilon (float). A cache output may be bound to the memory of its input. Windows and prompt runs are
    padded to rectangles, runs to the longest one; each reads the blocks up to its longest row. Scores and sums are
    float32.

    All keys and values are written before any are read. A window may follow a prompt run of the same text; causality
    hides the window from the run. ONNX cannot gather or scatter float8, so the function converts the full float8 cache
    in both directions.
    """
    name = "float8_window_attention" if float8 else "window_attention"
    body = Body.up_to(name, present)
    qkv, key_cache, value_cache, block_table, write_index, *_, cosine, sine = body.inputs[:11]
    heads, head_dim = body.integer("heads"), key_cache.size(3)
    block_size, batch = key_cache.size(2), write_index.size(0)
    runs = _Runs.of(body)
    windows = qkv.size(0) - runs.rows.size(0)
    query = windows / batch

    window_positions = write_index.expand_dims(1) + body.arange(query)
    window_rows = body.op("Expand", body.arange(batch).expand_dims(1), body.concat(batch, query, axis=0))
    real = body.concat(body.full(windows, np.bool_(True)), runs.real, axis=0)  # [tokens]
    positions = body.concat(body.op("Reshape", window_positions, _ALL), runs.positions, axis=0)
    rows = body.concat(body.op("Reshape", window_rows, _ALL), runs.rows + batch, axis=0)

    # Each is [tokens, heads, head_dim].
    fed = body.op("Reshape", qkv, body.concat(_ZERO, _ALL, head_dim, axis=0))
    new_heads = (fed.size(1) - heads) / np.int64(2)  # of keys; none in a layer that reads an earlier one's
    q, k, v = body.ops("Split", fed, body.concat(heads, new_heads, new_heads, axis=0), outputs=3, axis=1)
    if "q_norm" in present:
        q, k = _normed(body, q, body["q_norm"]), _normed(body, k, body["k_norm"])
    ones = body.op("CastLike", body.full(head_dim, np.float32(1)), qkv)
    v = body.where(body.integer("value_norm") > np.int64(0), _normed(body, v, ones), v)
    turned = _rotated(body, body.concat(q, k, axis=1), cosine, sine, positions)
    q, k = body.ops("Split", turned, body.concat(heads, new_heads, axis=0), outputs=2, axis=1)

    def written(cache: BodyValue, values: BodyValue) -> BodyValue:
        return body.op("ScatterND", cache, indices, body.op("Compress", values, real, axis=0))

    scales = [body.number(name) for name in ("key_scale", "value_scale")] if float8 else None
    if scales is not None:
        key_cache, value_cache = (cache.cast(FLOAT32) for cache in (key_cache, value_cache))
        k, v = (_in_float8(body, x.cast(FLOAT32) / by).cast(FLOAT32) for x, by in zip((k, v), scales, strict=True))

    used_rows, used_positions = (body.op("Compress", x, real, axis=0) for x in (rows, positions))
    tables = body.concat(block_table, runs.table, axis=0).cast(INT64)
    at = body.concat(used_rows.expand_dims(1), (used_positions / block_size).expand_dims(1), axis=1)
    everywhere = body.concat(used_rows.size(0), new_heads, axis=0)
    block, offset = (
        body.op("Expand", x.expand_dims(1), everywhere)
        for x in (body.op("GatherND", tables, at), body.op("Mod", used_positions, block_size))
    )
    head = body.op("Expand", body.arange(new_heads), everywhere)
    indices = body.concat(*(x.expand_dims(2) for x in (block, head, offset)), axis=2)
    present_key, present_value = written(key_cache, k), written(value_cache, v)

    sinks = body["sinks"] if "sinks" in present else None
    attend = _Attention(body, present_key, present_value, scales, sinks)
    rectangle = _reshaped(body, q.first(windows, axis=0), batch, query, heads, head_dim)
    mixed = attend(rectangle, block_table, write_index, write_index + query)

    def with_prompts() -> tuple[BodyValue]:
        places = runs.places + windows
        image_ends = body.op("Gather", body["image_ends"], places) if "image_ends" in present else None
        of_prompts = attend(body.op("Gather", q, places, axis=0), runs.table, runs.index, runs.ends, image_ends)
        nothing = body.full(body.concat(_ONE, heads * head_dim, axis=0), np.float32(0))
        of_prompts = body.op("Gather", body.concat(of_prompts, nothing, axis=0), runs.place_of_token, axis=0)
        return (body.concat(mixed, of_prompts, axis=0),)

    [joined] = body.branch(runs.any, with_prompts, lambda: (mixed,))
    if float8:
        present_key, present_value = _in_float8(body, present_key), _in_float8(body, present_value)
    return body.function(
        mixed=body.op("CastLike", joined, qkv), present_key_cache=present_key, present_value_cache=present_value
    )


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (window_attention(present),)


def float8_bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (window_attention(present, float8=True),)


@dataclass(frozen=True)
class _Runs:
    """The prompt runs as a rectangle [prompts, longest].

    ``places`` [prompts, longest]: token indices, relative to the first prompt token. Per prompt token: ``rows``, its
    run; ``positions``; ``real``, false for padding; ``place_of_token``, its index in the flat rectangle (padding gets
    the index after the end). ``ends`` [prompts]: the ends of the runs in their texts. ``any`` []: whether there are
    prompt tokens, padding included.
    """

    rows: BodyValue
    positions: BodyValue
    real: BodyValue
    place_of_token: BodyValue
    places: BodyValue
    index: BodyValue
    ends: BodyValue
    table: BodyValue
    any: BodyValue

    @classmethod
    def of(cls, body: Body) -> "_Runs":
        token_rows, starts, index, table = body.inputs[5:9]
        starts, tokens = starts.cast(INT64), token_rows.size(0)
        real = token_rows >= np.int32(0)
        rows = body.where(real, token_rows, np.int32(0)).cast(INT64)
        begins = starts.first(index.size(0), axis=0)
        lengths = body.op("Slice", starts, _ONE, starts.size(0)) - begins
        longest = body.op("ReduceMax", body.concat(lengths, _ONE, axis=0), keepdims=1)
        offsets = body.where(real, body.arange(tokens) - body.op("Gather", starts, rows), np.int64(0))
        places = begins.expand_dims(1) + body.arange(longest)
        return cls(
            rows=rows,
            positions=body.op("Gather", index, rows) + offsets,
            real=real,
            place_of_token=body.where(real, rows * longest + offsets, index.size(0) * longest),
            places=body.op("Min", places, tokens - np.int64(1)),
            index=index,
            ends=index + lengths,
            table=table,
            any=(tokens > np.int64(0)).squeeze(0),
        )


@dataclass(frozen=True)
class _Attention:
    """Attention over caches that already hold the new tokens; ``scales`` are those of a float8 cache, if any.

    ``sinks`` [heads] are further logits of every softmax, if there are some.

    A token's result has the same bits in every call. Each matmul therefore reads one block of the cache, and the sums
    of the blocks are added in their order: the length of the longest row changes only how many zeros are added.
    """

    body: Body
    key_cache: BodyValue
    value_cache: BodyValue
    scales: Sequence[BodyValue] | None
    sinks: BodyValue | None

    def __call__(
        self, q: BodyValue, table: BodyValue, start: BodyValue, end: BodyValue, image_ends: BodyValue | None = None
    ) -> BodyValue:
        """Return float32 [rows * query, heads * head_dim] for ``q`` [rows, query, heads, head_dim].

        ``table`` is [rows, max_blocks]. Token j of a row has position ``start`` [rows] + j. Positions from ``end``
        [rows] on are unused: tokens there only fill the rectangle. ``image_ends`` [rows, query] as in the reference.
        """
        body, key_cache = self.body, self.key_cache
        heads, kv_heads = body.integer("heads"), body.integer("kv_heads")
        block_size, head_dim, rows = key_cache.size(2), key_cache.size(3), q.size(0)
        group, real_query = heads / kv_heads, q.size(1)
        # A matmul of one row would round differently, see Body.matmul.
        query = real_query + (group * real_query).equals(np.int64(1)).cast(INT64)
        zero = body.op("CastLike", np.float32(0), q)
        q = body.op("Pad", q, body.concat(_ZERO, query - real_query, axis=0), zero, _ONE)
        positions = start.expand_dims(1) + body.arange(query)
        length = body.op("ReduceMax", body.concat(end, _ONE, axis=0), keepdims=0)
        blocks = (length + block_size - np.int64(1)) / block_size
        used = table.first(blocks, axis=1)

        keys, values = (  # [rows, blocks, kv_heads, block_size, head_dim]
            body.op("Gather", cache, used, axis=0).cast(FLOAT32) for cache in (key_cache, self.value_cache)
        )
        if self.scales is not None:
            keys, values = keys * self.scales[0], values * self.scales[1]
        seen = body.arange(blocks * block_size)
        distance = positions.expand_dims(2) - seen  # [rows, query, tokens]
        window = body.integer("sliding_window")
        seen_at_all = distance >= np.int64(0)
        if image_ends is not None:
            ends = body.op("Pad", image_ends, body.concat(_ZERO, query - real_query, axis=0), np.int64(0), _ONE)
            seen_at_all = seen_at_all | (ends.expand_dims(2) > seen)
        visible = seen_at_all & ((distance < window) | window.equals(np.int64(0)))
        # Zero unwritten entries: they may hold NaN, and NaN times a weight of 0 is NaN.
        cached = _reshaped(body, end.expand_dims(1) > seen, rows, blocks, _ONE, block_size, _ONE)
        values = body.where(cached, values, np.float32(0))

        # All queries that read a KV head are the rows of one matmul.
        merged = group * query
        turned = body.op("Transpose", q, perm=[0, 2, 1, 3]).cast(FLOAT32) * body.number("scale")
        grouped = _reshaped(body, turned, rows, _ONE, kv_heads, merged, head_dim)
        scores = body.op("MatMul", grouped, body.op("Transpose", keys, perm=[0, 1, 2, 4, 3]))
        scores = body.op("Transpose", scores, perm=[0, 2, 3, 1, 4])  # [rows, kv_heads, merged, blocks, block_size]
        scores = _reshaped(body, scores, rows, kv_heads, group, query, blocks * block_size)
        scores = body.where(visible.expand_dims(1, 2), scores, np.float32(-np.inf))
        weights = _reshaped(body, self._softmax(scores), rows, kv_heads, merged, blocks, block_size)
        by_block = body.op("MatMul", body.op("Transpose", weights, perm=[0, 3, 1, 2, 4]), values)
        # ReduceSum promises no order, so more blocks might change it.
        mixed = body.op("Gather", body.op("CumSum", by_block, np.int64(1)), np.int64(-1), axis=1)
        split = _reshaped(body, mixed, rows, heads, query, head_dim).first(real_query, axis=2)
        return _reshaped(body, body.op("Transpose", split, perm=[0, 2, 1, 3]), rows * real_query, heads * head_dim)

    def _softmax(self, scores: BodyValue) -> BodyValue:
        """Return the weights for ``scores`` [rows, kv_heads, group, query, tokens]; a sink's weight is dropped."""
        body, sinks = self.body, self.sinks
        if sinks is None:
            return body.op("Softmax", scores, axis=-1)
        by_head = body.op("Reshape", sinks, body.concat(scores.size(1), scores.size(2), _ONE, _ONE, axis=0))
        column = body.op("Expand", by_head, body.concat(body.op("Shape", scores, end=4), _ONE, axis=0))
        weights = body.op("Softmax", body.concat(column, scores, axis=-1), axis=-1)  # in a place that never moves
        return body.op("Slice", weights, _ONE, weights.size(-1), _ALL)


def _normed(body: Body, x: BodyValue, weight: BodyValue) -> BodyValue:
    """Return the RMS norm of each head of ``x``."""
    epsilon = body.attribute("epsilon", ir.AttributeType.FLOAT, "epsilon")
    return body.op("RMSNormalization", x, weight, axis=-1, epsilon=epsilon, stash_type=1)


def _rotated(body: Body, x: BodyValue, cosine: BodyValue, sine: BodyValue, positions: BodyValue) -> BodyValue:
    """Return ``x`` [tokens, heads, head_dim], rotated for ``positions`` [tokens]."""
    # Pass each token as a sequence of its own: the operator limits a sequence to the length of the tables.
    return body.op("RotaryEmbedding", x.expand_dims(2), cosine, sine, positions.expand_dims(1)).squeeze(2)


def _reshaped(body: Body, x: BodyValue, *sizes: BodyValue | np.ndarray) -> BodyValue:
    """Return ``x`` in a shape of ``sizes``, each int64 [1]; any of them may be 0."""
    return body.op("Reshape", x, body.concat(*sizes, axis=0), allowzero=1)


def _in_float8(body: Body, x: BodyValue) -> BodyValue:
    """Return float32 ``x`` as float8_e4m3fn; saturates values out of range."""
    return body.op("Cast", x, to=int(ir.DataType.FLOAT8E4M3FN), saturate=1)

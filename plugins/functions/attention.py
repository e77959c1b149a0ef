"""``window_attention`` in standard operators."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, INT64, Body, Tensor

_ZERO, _ONE, _ALL = (np.array([each], np.int64) for each in (0, 1, -1))


def window_attention(*, qk_norm: bool, float8: bool = False) -> ir.Function:
    """Inputs and outputs as in the reference; ``qk_norm`` adds the inputs q_norm and k_norm. ``float8``: the caches are
    in it, and the attributes key_scale and value_scale (float) are there; the function is ``float8_window_attention``.

    Attributes, all of them required: heads, kv_heads, sliding_window (int), scale, epsilon (float). A cache output
    may be bound to the memory of its input. Windows are a rectangle, and so are the runs of prompts, as wide as the
    longest; each reads the blocks up to its longest row. Scores and sums are float32.

    Everything is written before anything is read: a window stands behind a run of the same text, which does not see it.
    Nothing in ONNX gathers or scatters float8, so a cache in it is widened as a whole, and rounded as a whole.
    """
    name = "float8_window_attention" if float8 else "window_attention"
    body = Body.of(name, without=() if qk_norm else ("q_norm", "k_norm"))
    qkv, key_cache, value_cache, block_table, write_index, *_, cosine, sine = body.inputs[:11]
    heads, kv_heads, head_dim = _integer(body, "heads"), _integer(body, "kv_heads"), key_cache.size(3)
    block_size, batch = key_cache.size(2), write_index.size(0)
    runs = _Runs.of(body)
    windows = qkv.size(0) - runs.rows.size(0)
    query = windows / batch

    window_positions = write_index.expand_dims(1) + body.arange(query)
    window_rows = body.op("Expand", body.arange(batch).expand_dims(1), body.concat(batch, query, axis=0))
    real = body.concat(body.full(windows, np.bool_(True)), runs.real, axis=0)  # [tokens]
    positions = body.concat(body.op("Reshape", window_positions, _ALL), runs.positions, axis=0)
    rows = body.concat(body.op("Reshape", window_rows, _ALL), runs.rows + batch, axis=0)

    q, k, v = body.ops(
        "Split",
        body.op("Reshape", qkv, body.concat(_ZERO, _ALL, head_dim, axis=0)),
        body.concat(heads, kv_heads, kv_heads, axis=0),
        outputs=3,
        axis=1,
    )  # [tokens, heads, head_dim]
    epsilon = body.attribute("epsilon", ir.AttributeType.FLOAT, "epsilon")
    if qk_norm:
        q, k = (
            body.op("RMSNormalization", x, norm, axis=-1, epsilon=epsilon, stash_type=1)
            for x, norm in zip((q, k), body.inputs[11:], strict=True)
        )
    q, k = (_rotated(body, x, cosine, sine, positions) for x in (q, k))

    def written(cache: Tensor, values: Tensor) -> Tensor:
        return body.op("ScatterND", cache, indices, body.op("Compress", values, real, axis=0))

    scales = [_number(body, name) for name in ("key_scale", "value_scale")] if float8 else None
    if scales is not None:
        key_cache, value_cache = (cache.cast(FLOAT32) for cache in (key_cache, value_cache))
        k, v = (_in_float8(body, x.cast(FLOAT32) / by).cast(FLOAT32) for x, by in zip((k, v), scales, strict=True))

    used_rows, used_positions = (body.op("Compress", x, real, axis=0) for x in (rows, positions))
    tables = body.concat(block_table, runs.table, axis=0).cast(INT64)
    at = body.concat(used_rows.expand_dims(1), (used_positions / block_size).expand_dims(1), axis=1)
    everywhere = body.concat(used_rows.size(0), kv_heads, axis=0)
    block, offset = (
        body.op("Expand", x.expand_dims(1), everywhere)
        for x in (body.op("GatherND", tables, at), body.op("Mod", used_positions, block_size))
    )
    head = body.op("Expand", body.arange(kv_heads), everywhere)
    indices = body.concat(*(x.expand_dims(2) for x in (block, head, offset)), axis=2)
    present_key, present_value = written(key_cache, k), written(value_cache, v)

    attend = _Attention(body, present_key, present_value, scales)
    rectangle = _reshaped(body, q.first(windows, axis=0), batch, query, heads, head_dim)
    mixed = attend(rectangle, block_table, write_index, write_index + query)

    def with_prompts() -> tuple[Tensor]:
        found = attend(body.op("Gather", q, runs.places + windows, axis=0), runs.table, runs.index, runs.ends)
        nothing = body.full(body.concat(_ONE, heads * head_dim, axis=0), np.float32(0))
        found = body.op("Gather", body.concat(found, nothing, axis=0), runs.place_of_token, axis=0)
        return (body.concat(mixed, found, axis=0),)

    [joined] = body.branch(runs.any, with_prompts, lambda: (mixed,))
    if float8:
        present_key, present_value = _in_float8(body, present_key), _in_float8(body, present_value)
    return body.function(
        mixed=body.op("CastLike", joined, qkv), present_key_cache=present_key, present_value_cache=present_value
    )


def bodies(dtype: str, given: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """See plugins/faces.py."""
    return (window_attention(qk_norm="q_norm" in given),)


def float8_bodies(dtype: str, given: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """See plugins/faces.py."""
    return (window_attention(qk_norm="q_norm" in given, float8=True),)


@dataclass(frozen=True)
class _Runs:
    """The runs of prompts as a rectangle: ``places`` [prompts, longest] are tokens, counted from the first of them.

    ``rows``, ``positions``, ``real`` and ``place_of_token`` [prompt_tokens]: run, position, whether it is no padding,
    and place in the rectangle of each token; that of padding is behind it. ``ends`` [prompts]: where the runs end in
    their texts. ``any`` []: whether there are tokens, padding included.
    """

    rows: Tensor
    positions: Tensor
    real: Tensor
    place_of_token: Tensor
    places: Tensor
    index: Tensor
    ends: Tensor
    table: Tensor
    any: Tensor

    @classmethod
    def of(cls, body: Body) -> "_Runs":
        given, starts, index, table = body.inputs[5:9]
        starts, tokens = starts.cast(INT64), given.size(0)
        real = given >= np.int32(0)
        rows = body.where(real, given, np.int32(0)).cast(INT64)
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
    """Attention over caches that hold the new tokens, those of keys and of values over ``scales`` if there are any."""

    body: Body
    key_cache: Tensor
    value_cache: Tensor
    scales: Sequence[Tensor] | None

    def __call__(self, q: Tensor, table: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """[rows * query, heads * head_dim], float32, of ``q`` [rows, query, heads, head_dim].

        ``table`` [rows, max_blocks]. Token j of a row stands at ``start`` [rows] + j. What lies from ``end`` [rows] on
        is nobody's: tokens that stand there only fill the rectangle.
        """
        body, key_cache = self.body, self.key_cache
        heads, kv_heads = _integer(body, "heads"), _integer(body, "kv_heads")
        block_size, head_dim, query = key_cache.size(2), key_cache.size(3), q.size(1)
        positions = start.expand_dims(1) + body.arange(query)
        length = body.op("ReduceMax", body.concat(end, _ONE, axis=0), keepdims=0)
        used = table.first((length + block_size - np.int64(1)) / block_size, axis=1)

        def gathered(cache: Tensor) -> Tensor:  # [rows, kv_heads, tokens, head_dim]
            blocks = body.op("Transpose", body.op("Gather", cache, used, axis=0), perm=[0, 2, 1, 3, 4])
            shape = body.concat(_ZERO, kv_heads, _ALL, head_dim, axis=0)
            return body.op("Reshape", blocks, shape).cast(FLOAT32)

        keys, values = gathered(key_cache), gathered(self.value_cache)
        if self.scales is not None:
            keys, values = keys * self.scales[0], values * self.scales[1]
        seen = body.arange(keys.size(2))
        distance = positions.expand_dims(2) - seen  # [rows, query, tokens]
        window = _integer(body, "sliding_window")
        visible = (distance >= np.int64(0)) & ((distance < window) | window.equals(np.int64(0)))
        # Entries that no token of the row sees may hold anything: NaN times a weight of 0 would still be NaN.
        cached = end.expand_dims(1, 2) > seen.expand_dims(1)  # [rows, tokens, 1]
        values = body.where(cached.expand_dims(1), values, np.float32(0))

        turned = body.op("Transpose", q, perm=[0, 2, 1, 3]).cast(FLOAT32)
        grouped = _reshaped(body, turned, q.size(0), kv_heads, heads / kv_heads, query, head_dim)
        scale = _number(body, "scale")
        transposed = body.op("Transpose", keys.expand_dims(2), perm=[0, 1, 2, 4, 3])
        scores = body.op("MatMul", grouped * scale, transposed)
        scores = body.where(visible.expand_dims(1, 2), scores, np.float32(-np.inf))
        mixed = body.op("MatMul", body.op("Softmax", scores, axis=-1), values.expand_dims(2))
        split = _reshaped(body, mixed, q.size(0), heads, query, head_dim)
        return _reshaped(body, body.op("Transpose", split, perm=[0, 2, 1, 3]), q.size(0) * query, heads * head_dim)


def _rotated(body: Body, x: Tensor, cosine: Tensor, sine: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of ``x`` [tokens, heads, head_dim] at ``positions`` [tokens]."""
    # Each token is a text of its own: one text may not be longer than the tables.
    return body.op("RotaryEmbedding", x.expand_dims(2), cosine, sine, positions.expand_dims(1)).squeeze(2)


def _reshaped(body: Body, x: Tensor, *sizes: Tensor) -> Tensor:
    """``x`` in a shape of ``sizes``, each int64 [1], any of which may be 0."""
    return body.op("Reshape", x, body.concat(*sizes, axis=0), allowzero=1)


def _in_float8(body: Body, x: Tensor) -> Tensor:
    """``x``, float32, in float8_e4m3fn; what is too large becomes the largest."""
    return body.op("Cast", x, to=int(ir.DataType.FLOAT8E4M3FN), saturate=1)


def _number(body: Body, name: str) -> Tensor:
    """A float attribute as float32 []."""
    return body.op("Constant", value_float=body.attribute(name, ir.AttributeType.FLOAT, "value_float"))


def _integer(body: Body, name: str) -> Tensor:
    """An integer attribute as int64 [1]."""
    reference = body.attribute(name, ir.AttributeType.INT, "value_int")
    return body.op("Constant", value_int=reference).expand_dims(0)

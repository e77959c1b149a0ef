"""``window_attention``: grouped-query attention of new tokens over a paged cache, their own entries included."""

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.float8 import FLOAT8, FLOAT8_MAX


def window_attention(
    qkv: npt.NDArray,
    key_cache: npt.NDArray,
    value_cache: npt.NDArray,
    block_table: npt.ArrayLike,
    write_index: npt.ArrayLike,
    prompt_rows: npt.ArrayLike,
    prompt_starts: npt.ArrayLike,
    prompt_index: npt.ArrayLike,
    prompt_table: npt.ArrayLike,
    cosine: npt.NDArray,
    sine: npt.NDArray,
    q_norm: npt.NDArray | None = None,
    k_norm: npt.NDArray | None = None,
    sinks: npt.NDArray | None = None,
    image_ends: npt.ArrayLike | None = None,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    epsilon: float = 1e-6,
    sliding_window: int = 0,
    value_norm: int = 0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray]:
    """Return (mixed [tokens, heads * head_dim], key_cache, value_cache); the caches are updated copies.

    ``qkv`` [tokens, (heads + 2 * kv_heads) * head_dim] holds queries, keys and values, head after head. These are the
    tokens of a packed call (engines/contract/contract.py: packed), placed by ``block_table`` int [batch, max_blocks],
    ``write_index`` int [batch], ``prompt_rows`` int [prompt_tokens], ``prompt_starts`` int [prompts + 1],
    ``prompt_index`` int [prompts] and ``prompt_table`` int [prompts, max_blocks]. Caches are [blocks, kv_heads,
    block_size, head_dim]. ``cosine`` and ``sine`` [positions, head_dim // 2] rotate the halves of a head. ``q_norm``
    and ``k_norm`` [head_dim] are RMS norm weights. ``sinks`` float32 [heads] are logits that enter the softmax of every
    token and have no value. With ``value_norm`` new values are normed, without a weight.

    ``qkv`` without keys and values: the layer writes none, and its tokens see those that the cache has already.

    Token j of a row or run with i tokens in its cache has position i + j and is written there. It sees the positions up
    to its own: all of them, or the last ``sliding_window`` if that is not 0. With ``image_ends`` int [tokens], a token
    of a run sees later positions, too, up to this end, which its run reaches; 0 for text. All prompts are complete
    before windows are written. ``mixed`` of padding is 0. Computed in float64; keys and values are rounded to the dtype
    of the cache before any token sees them, the result once to the dtype of ``qkv``.

    Caches in float8_e4m3fn hold keys divided by ``key_scale`` and values divided by ``value_scale``; values that are
    too large become the largest of float8. This is the operator ``float8_window_attention``. A new token sees its own
    key and value rounded, as other tokens do.
    """
    key_cache, value_cache = key_cache.copy(), value_cache.copy()
    starts, index = np.asarray(prompt_starts), np.asarray(write_index)
    windows, batch = len(qkv) - len(np.asarray(prompt_rows)), len(index)
    split = qkv.astype(np.float64).reshape(len(qkv), -1, key_cache.shape[-1])
    q, k, v = np.split(split, [heads, heads + kv_heads], axis=1)
    if q_norm is not None and k_norm is not None:
        q, k = _rms_norm(q, q_norm, epsilon), _rms_norm(k, k_norm, epsilon)
    if value_norm:
        v = _rms_norm(v, np.ones(v.shape[-1]), epsilon)
    sink = np.full((heads, 1, 1), -np.inf) if sinks is None else np.asarray(sinks).astype(np.float64)[:, None, None]
    mixed = np.zeros(q.shape)
    window_starts = np.arange(batch + 1) * (windows // batch)
    ends = np.zeros(len(qkv), np.int64) if image_ends is None else np.asarray(image_ends)
    for first, index_of, table in (
        (windows + starts, np.asarray(prompt_index), np.asarray(prompt_table)),
        (window_starts, index, np.asarray(block_table)),
    ):
        runs = [
            (slice(*first[run : run + 2]), at + np.arange(first[run + 1] - first[run]), table[run])
            for run, at in enumerate(index_of)
        ]
        for tokens, positions, row in runs if k.size else ():
            blocks, offsets = _entries(row, positions, key_cache)
            turned = _rotate(k[tokens], cosine[positions], sine[positions])
            key_cache[blocks, :, offsets] = _stored(turned, key_scale, key_cache.dtype)
            value_cache[blocks, :, offsets] = _stored(v[tokens], value_scale, value_cache.dtype)
        for tokens, positions, row in runs:
            seen = np.arange(positions[-1] + 1 if len(positions) else 0)
            blocks, offsets = _entries(row, seen, key_cache)
            keys, values = (
                np.repeat(cache[blocks, :, offsets].astype(np.float64) * by, heads // kv_heads, axis=1)
                for cache, by in ((key_cache, key_scale), (value_cache, value_scale))
            )
            distance = positions[:, None] - seen
            later = seen < ends[tokens, None]
            visible = ((distance >= 0) | later) & ((distance < sliding_window) | (sliding_window == 0))
            query = _rotate(q[tokens], cosine[positions], sine[positions]).swapaxes(0, 1)
            scores = np.where(visible, scale * (query @ keys.transpose(1, 2, 0)), -np.inf)
            largest = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), sink)
            weights = np.exp(scores - largest)
            total = weights.sum(-1, keepdims=True) + np.exp(sink - largest)
            mixed[tokens] = (weights / total @ values.swapaxes(0, 1)).swapaxes(0, 1)
    return mixed.reshape(len(qkv), -1).astype(qkv.dtype), key_cache, value_cache


def _stored(x: npt.NDArray, scale: float, dtype: npt.DTypeLike) -> npt.NDArray:
    """Return ``x`` as a cache of ``dtype`` holds it."""
    over = x / scale
    return (np.clip(over, -FLOAT8_MAX, FLOAT8_MAX) if dtype == FLOAT8 else over).astype(dtype)


def _entries(row: npt.NDArray, positions: npt.NDArray, cache: npt.NDArray) -> tuple[npt.NDArray, npt.NDArray]:
    """Return the block and the offset in it of each position, for one row of the table."""
    block_size = cache.shape[2]
    return row[positions // block_size], positions % block_size


def _rms_norm(x: npt.NDArray, weight: npt.NDArray, epsilon: float) -> npt.NDArray:
    normed: npt.NDArray = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight.astype(np.float64)
    return normed


def _rotate(x: npt.NDArray, cosine: npt.NDArray, sine: npt.NDArray) -> npt.NDArray:
    # x [tokens, heads, head_dim]; the tables [tokens, head_dim // 2]
    first, second = np.split(x, 2, axis=-1)
    cos, sin = (table.astype(np.float64)[:, None] for table in (cosine, sine))
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

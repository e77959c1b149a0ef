"""``window_attention``: grouped-query attention of new tokens over a paged cache, their own entries included."""

import numpy as np
import numpy.typing as npt


def window_attention(
    qkv: npt.NDArray,
    key_cache: npt.NDArray,
    value_cache: npt.NDArray,
    block_table: npt.ArrayLike,
    write_index: npt.ArrayLike,
    cosine: npt.NDArray,
    sine: npt.NDArray,
    q_norm: npt.NDArray | None = None,
    k_norm: npt.NDArray | None = None,
    *,
    heads: int,
    kv_heads: int,
    scale: float,
    epsilon: float = 1e-6,
    sliding_window: int = 0,
) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray]:
    """Return (mixed [batch, query, heads * head_dim], key_cache, value_cache); the caches are updated copies.

    ``qkv`` [batch, query, (heads + 2 * kv_heads) * head_dim] holds queries, keys and values, head after head.
    Caches [blocks, kv_heads, block_size, head_dim]; ``block_table`` int [batch, max_blocks] lists a row's blocks;
    ``write_index`` int [batch] counts the tokens a row has already cached. ``cosine`` and ``sine``
    [positions, head_dim // 2] rotate the halves of a head. ``q_norm`` and ``k_norm`` [head_dim] are RMS norm weights.

    Token j of row b stands at position write_index[b] + j, is written there, and sees the positions up to its own:
    all of them, or the last ``sliding_window`` if that is not 0. Computed in float64; keys and values are rounded to
    the dtype of the cache before they are seen, the result once to that of ``qkv``.
    """
    table, start = np.asarray(block_table), np.asarray(write_index)
    key_cache, value_cache = key_cache.copy(), value_cache.copy()
    block_size, head_dim = key_cache.shape[2:]
    batch, query, _ = qkv.shape
    split = qkv.astype(np.float64).reshape(batch, query, heads + 2 * kv_heads, head_dim)
    q, k, v = np.split(split, [heads, heads + kv_heads], axis=2)
    if q_norm is not None and k_norm is not None:
        q, k = _rms_norm(q, q_norm, epsilon), _rms_norm(k, k_norm, epsilon)
    positions = start[:, None] + np.arange(query)
    q, k = (_rotate(x, cosine[positions], sine[positions]) for x in (q, k))
    mixed = np.empty((batch, query, heads, head_dim))
    for row in range(batch):
        blocks, offsets = table[row, positions[row] // block_size], positions[row] % block_size
        key_cache[blocks, :, offsets] = k[row]
        value_cache[blocks, :, offsets] = v[row]
    for row in range(batch):
        seen = np.arange(start[row] + query)
        blocks, offsets = table[row, seen // block_size], seen % block_size
        keys, values = (
            np.repeat(cache[blocks, :, offsets].astype(np.float64), heads // kv_heads, axis=1)
            for cache in (key_cache, value_cache)
        )
        distance = positions[row][:, None] - seen
        visible = (distance >= 0) & ((distance < sliding_window) | (sliding_window == 0))
        scores = np.where(visible, scale * (q[row].swapaxes(0, 1) @ keys.transpose(1, 2, 0)), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[row] = (weights / weights.sum(-1, keepdims=True) @ values.swapaxes(0, 1)).swapaxes(0, 1)
    return mixed.reshape(batch, query, -1).astype(qkv.dtype), key_cache, value_cache


def _rms_norm(x: npt.NDArray, weight: npt.NDArray, epsilon: float) -> npt.NDArray:
    normed: npt.NDArray = x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight.astype(np.float64)
    return normed


def _rotate(x: npt.NDArray, cosine: npt.NDArray, sine: npt.NDArray) -> npt.NDArray:
    # x [batch, query, heads, head_dim]; the tables [batch, query, head_dim // 2]
    first, second = np.split(x, 2, axis=-1)
    cos, sin = (table.astype(np.float64)[:, :, None] for table in (cosine, sine))
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

"""``decode_attention``: grouped-query attention of new tokens over a linear cache, their own entries included."""

import numpy as np
import numpy.typing as npt


def decode_attention(
    qkv: npt.NDArray,
    past_key: npt.NDArray,
    past_value: npt.NDArray,
    write_index: npt.ArrayLike,
    cosine: npt.NDArray,
    sine: npt.NDArray,
    ends: npt.NDArray | None = None,
    *,
    heads: int,
    sliding_window: int,
    scale: float,
) -> tuple[npt.NDArray, npt.NDArray, npt.NDArray]:
    """Return (mixed [batch, query, heads * head_dim], keys, values); the caches are updated copies.

    ``qkv`` [batch, query, (heads + 2 * kv_heads) * head_dim] holds queries, keys and values, head after head. The
    caches are [batch, kv_heads, capacity, head_dim]. Token j of row b has position ``write_index[b]`` + j and is
    written there. It sees the positions up to its own: all of them, or the last ``sliding_window`` if that is not 0.
    ``cosine`` and ``sine`` [positions, half] rotate the halves of the first 2 * half values of a head; ``half`` may
    be 0. ``ends`` [batch, query]: a token sees later positions, too, up to this end, which the call or one before has
    written. Computed in float64; the results are rounded once.
    """
    keys, values = past_key.copy(), past_value.copy()
    batch, query, _ = qkv.shape
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    split = qkv.astype(np.float64).reshape(batch, query, heads + 2 * kv_heads, head_dim)
    mixed = np.zeros((batch, query, heads, head_dim))
    for row, index in enumerate(np.asarray(write_index)):
        positions = np.arange(index, index + query)
        q, k, v = np.split(split[row].swapaxes(0, 1), [heads, heads + kv_heads])
        q, k = (_rotated(x, cosine[positions], sine[positions]) for x in (q, k))
        keys[row, :, positions] = k.swapaxes(0, 1)
        values[row, :, positions] = v.swapaxes(0, 1)
        seen = np.arange(index + query)
        end = positions + 1 if ends is None else np.maximum(positions + 1, ends[row])
        in_window = (positions[:, None] - seen < sliding_window) | (sliding_window == 0)
        sees = (seen < end[:, None]) & in_window
        cached = (np.repeat(x[row, :, seen].astype(np.float64), heads // kv_heads, 1) for x in (keys, values))
        all_keys, all_values = (x.swapaxes(0, 1) for x in cached)
        scores = np.where(sees, scale * (q @ all_keys.swapaxes(1, 2)), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed[row] = (weights / weights.sum(-1, keepdims=True) @ all_values).swapaxes(0, 1)
    return mixed.reshape(batch, query, -1).astype(qkv.dtype), keys, values


def _rotated(x: npt.NDArray, cosine: npt.NDArray, sine: npt.NDArray) -> npt.NDArray:
    half = cosine.shape[-1]
    first, second, rest = np.split(x, [half, 2 * half], axis=-1)
    return np.concatenate([first * cosine - second * sine, second * cosine + first * sine, rest], axis=-1)

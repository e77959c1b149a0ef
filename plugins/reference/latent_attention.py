"""``latent_attention``: attention of new tokens over a paged cache with one latent vector per token for all heads."""

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.reference.attention import window_attention


def latent_attention(
    query: npt.NDArray,
    key: npt.NDArray,
    cache: npt.NDArray,
    block_table: npt.ArrayLike,
    write_index: npt.ArrayLike,
    prompt_rows: npt.ArrayLike,
    prompt_starts: npt.ArrayLike,
    prompt_index: npt.ArrayLike,
    prompt_table: npt.ArrayLike,
    cosine: npt.NDArray,
    sine: npt.NDArray,
    *,
    heads: int,
    scale: float,
) -> tuple[npt.NDArray, npt.NDArray]:
    """Return (mixed [tokens, heads * rank], cache); the cache is an updated copy.

    ``query`` [tokens, heads * cached] and ``key`` [tokens, cached] have the rotated values of a head first, then those
    of the latent vector, of which there are ``rank``. ``cosine`` and ``sine`` [positions, rotated // 2] rotate the
    first ones. ``cache`` is [blocks, 1, block_size, cached]; the value of a token is the latent part of its key. All
    other arguments, and what a token sees, are those of ``window_attention``, with one KV head.
    """
    tokens, cached = key.shape
    half, rotated = cosine.shape[1], 2 * cosine.shape[1]
    # window_attention rotates the halves of a whole head: put one half of the rotated part into each.
    order = [*range(half), *range(rotated, (rotated + cached) // 2), *range(half, rotated)]
    order += range((rotated + cached) // 2, cached)
    still = (len(cosine), cached // 2 - half)
    cosine = np.concatenate([cosine, np.ones(still, cosine.dtype)], axis=1)
    sine = np.concatenate([sine, np.zeros(still, sine.dtype)], axis=1)
    # A value is the unrotated key; its rotated part is not an output.
    joined = np.concatenate([query.reshape(tokens, heads, cached), key[:, None], key[:, None]], axis=1)[..., order]
    mixed, keys, _ = window_attention(
        joined.reshape(tokens, -1),
        cache[..., order],
        cache[..., order],
        block_table,
        write_index,
        prompt_rows,
        prompt_starts,
        prompt_index,
        prompt_table,
        cosine,
        sine,
        heads=heads,
        kv_heads=1,
        scale=scale,
    )
    places = np.argsort(order)
    vectors = mixed.reshape(tokens, heads, cached)[..., places[rotated:]]
    return vectors.reshape(tokens, -1), keys[..., places]

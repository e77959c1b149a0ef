"""Calls of ``window_attention`` with ragged rows and runs, for comparing its faces."""

import ml_dtypes
import numpy as np

from tandemrt.engines.operators import SCHEMAS
from tandemrt.plugins.reference import window_attention
from tandemrt.plugins.reference.float8 import FLOAT8

# A third of a number of float8 is never half way between two others.
SCALES = {"key_scale": 0.75, "value_scale": 0.75 / 32}
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NAMES = tuple(binding.name for binding in SCHEMAS["window_attention"].inputs)
PROMPTS = ("prompt_rows", "prompt_starts", "prompt_index", "prompt_table")


def case(
    lengths,
    query,
    runs=(),
    padding=0,
    *,
    heads=4,
    kv_heads=2,
    head_dim=64,
    block_size=64,
    max_blocks=None,
    norm=False,
    dtype=np.float32,
    cached=None,
    seed=0,
):
    """Tensors by name: rows that have cached ``lengths`` tokens each, in blocks of any order.

    Behind their windows stand ``runs`` of prompts, (tokens in the cache, new ones) each, and ``padding`` tokens.
    Caches are of dtype ``cached``, if not of that of the rest. Every entry that no row has written is NaN. Block 0 is
    scratch; a row of length 0 has all its blocks there.
    """
    rng = np.random.default_rng([seed, query, head_dim])
    batch, earlier = len(lengths), [*lengths, *(length for length, _ in runs)]
    counts = [new for _, new in runs]
    if max_blocks is None:
        ends = [*(length + query for length in lengths), *map(sum, runs)]
        max_blocks = max(1, -(-max(ends) // block_size))

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    texts = len(earlier)
    table = 1 + rng.permutation(texts * max_blocks).reshape(texts, max_blocks).astype(np.int32)
    table[:batch][np.array(lengths) == 0] = 0
    caches = [
        np.full((1 + texts * max_blocks, kv_heads, block_size, head_dim), np.nan, cached or dtype) for _ in range(2)
    ]
    for row, length in enumerate(earlier):
        positions = np.arange(length)
        for cache in caches:
            cache[table[row, positions // block_size], :, positions % block_size] = normal(length, kv_heads, head_dim)
    angles = rng.uniform(0, 2 * np.pi, (max_blocks * block_size, head_dim // 2))
    norms = [1 + normal(head_dim) / 4 for _ in range(2)] if norm else [None, None]
    values = [
        normal(batch * query + sum(counts) + padding, (heads + 2 * kv_heads) * head_dim),
        *caches,
        table[:batch],
        np.array(lengths, np.int64),
        np.array([*np.repeat(np.arange(len(runs)), counts), *[-1] * padding], np.int32),
        np.cumsum([0, *counts], dtype=np.int32),
        np.array([length for length, _ in runs], np.int64),
        table[batch:],
        np.cos(angles).astype(dtype),
        np.sin(angles).astype(dtype),
        *(None if each is None else each.astype(dtype) for each in norms),
    ]
    return dict(zip(NAMES, values, strict=True))


def case_in_float8(*args, dtype, **how):
    """As ``case``, over caches in float8, for ``attributes`` with SCALES.

    Keys and values of new tokens are numbers of float8, turned by right angles, so that without norms every face rounds
    the same numbers. Some values are too large for their scale.
    """
    tensors = case(*args, dtype=dtype, cached=FLOAT8, **how)
    tensors["qkv"] = tensors["qkv"].astype(FLOAT8).astype(dtype)
    tensors["qkv"][:, -2:] = [-12, 12]
    cosine, sine = (tensors[name].astype(np.float64) for name in ("cosine", "sine"))
    right = np.rint(np.arctan2(sine, cosine) / (np.pi / 2)) * np.pi / 2
    turned = {"cosine": np.rint(np.cos(right)).astype(dtype), "sine": np.rint(np.sin(right)).astype(dtype)}
    return tensors | turned


def attributes(*, heads=4, kv_heads=2, head_dim=64, sliding_window=0, **scales):
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "scale": head_dim**-0.5,
        "epsilon": 1e-6,
        "sliding_window": sliding_window,
        **scales,
    }


def expected(tensors, given):
    """What the definition says: mixed and both caches."""
    return window_attention(*(tensors[name] for name in NAMES), **given)


def assert_close(found, wanted, tensors, tolerance, *, cleared=0):
    """Results of live rows and runs are near; the caches too, and what no token was written to has not changed.

    Behind a run, up to the next multiple of ``cleared`` positions, it may have become 0.
    """
    live = tensors["block_table"].any(axis=1)
    windows = len(wanted[0]) - len(tensors["prompt_rows"])
    live = np.concatenate([np.repeat(live, windows // len(live)), tensors["prompt_rows"] >= 0])
    np.testing.assert_allclose(_wide(found[0])[live], _wide(wanted[0])[live], rtol=tolerance, atol=tolerance)
    for mine, theirs, name in zip(found[1:], wanted[1:], ("key_cache", "value_cache"), strict=True):
        mine, theirs, before = (_wide(cache)[1:] for cache in (mine, theirs, tensors[name]))
        untouched = ~((theirs != before) & ~np.isnan(theirs))
        excused = untouched & _behind_runs(tensors, cleared)[1:, None, :, None] & (mine == 0)
        mine = np.where(excused, before, mine)
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(mine[untouched], before[untouched])


def _behind_runs(tensors, tile):
    """The entries [blocks, block_size] behind runs, up to the next multiple of ``tile`` positions."""
    table, size = tensors["prompt_table"], tensors["key_cache"].shape[2]
    behind = np.zeros((len(tensors["key_cache"]), size), dtype=bool)
    counts = np.diff(tensors["prompt_starts"])
    for run, end in enumerate(tensors["prompt_index"] + counts):
        if counts[run] and tile:
            positions = np.arange(end, min(-(-end // tile) * tile, table.shape[1] * size))
            behind[table[run, positions // size], positions % size] = True
    return behind


def tolerance(dtype):
    """Of a sum of numbers near one, each rounded a few times on its way: two units in the last place."""
    return 2e-5 if dtype == np.float32 else 2 * float(ml_dtypes.finfo(dtype).eps)


def _wide(values):
    return values.astype(np.float64)

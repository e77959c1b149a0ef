"""Inputs for ``window_attention`` with ragged rows and runs, to compare its implementations."""

import ml_dtypes
import numpy as np

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.plugins.operators.float8 import FLOAT8
from tandemrt.plugins.reference import window_attention

# A third of a float8 number is never halfway between two others.
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
    sinks=False,
    images=(),
    writes=True,
    dtype=np.float32,
    cached=None,
    seed=0,
):
    """Tensors by name: rows with ``lengths`` cached tokens each, in blocks of random order.

    ``runs`` of prompts, (cached tokens, new tokens) each, follow the draft windows, then ``padding`` tokens.
    Caches have dtype ``cached``, by default that of the other tensors. Every unwritten cache entry is NaN. Block 0 is
    scratch; all blocks of a row of length 0 are there. Without ``writes`` queries have no keys and values, and the new
    positions are written already. ``images``: (run, first position, end) of images whose tokens see all of them.
    """
    rng = np.random.default_rng([seed, query, head_dim])
    batch, earlier = len(lengths), [*lengths, *(length for length, _ in runs)]
    counts = [new for _, new in runs]
    if max_blocks is None:
        ends = [*(length + query for length in lengths), *map(sum, runs)]
        max_blocks = max(1, -(-max(ends) // block_size))

    def normal(*shape):
        return rng.normal(size=shape).astype(dtype)

    texts, unwritten = len(earlier), np.nan if writes else 0  # 0 as the layer leaves it that wrote the cache
    table = 1 + rng.permutation(texts * max_blocks).reshape(texts, max_blocks).astype(np.int32)
    table[:batch][np.array(lengths) == 0] = 0
    caches = [
        np.full((1 + texts * max_blocks, kv_heads, block_size, head_dim), unwritten, cached or dtype) for _ in range(2)
    ]
    for row, length in enumerate(earlier):
        new = query if row < batch else counts[row - batch]
        length += 0 if writes else new
        positions = np.arange(length)
        for cache in caches:
            cache[table[row, positions // block_size], :, positions % block_size] = normal(length, kv_heads, head_dim)
    angles = rng.uniform(0, 2 * np.pi, (max_blocks * block_size, head_dim // 2))
    norms = [1 + normal(head_dim) / 4 for _ in range(2)] if norm else [None, None]
    ends = np.zeros(batch * query + sum(counts) + padding, np.int64)
    for run, first, end in images:
        at = batch * query + sum(counts[:run]) - runs[run][0]
        ends[at + max(first, runs[run][0]) : at + end] = end
    values = [
        normal(batch * query + sum(counts) + padding, (heads + 2 * kv_heads * writes) * head_dim),
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
        rng.normal(size=heads).astype(np.float32) if sinks else None,
        ends if images else None,
    ]
    return dict(zip(NAMES, values, strict=True))


def case_in_float8(*args, dtype, **how):
    """As ``case``, over caches in float8, for ``attributes`` with SCALES.

    New keys and values are float8 numbers, rotated by right angles, so that without norms every implementation rounds
    the same numbers. Some values exceed their scale.
    """
    tensors = case(*args, dtype=dtype, cached=FLOAT8, **how)
    tensors["qkv"] = tensors["qkv"].astype(FLOAT8).astype(dtype)
    tensors["qkv"][:, -2:] = [-12, 12]
    cosine, sine = (tensors[name].astype(np.float64) for name in ("cosine", "sine"))
    right = np.rint(np.arctan2(sine, cosine) / (np.pi / 2)) * np.pi / 2
    turned = {"cosine": np.rint(np.cos(right)).astype(dtype), "sine": np.rint(np.sin(right)).astype(dtype)}
    return tensors | turned


def attributes(*, heads=4, kv_heads=2, head_dim=64, sliding_window=0, value_norm=0, **scales):
    return {
        "heads": heads,
        "kv_heads": kv_heads,
        "scale": head_dim**-0.5,
        "epsilon": 1e-6,
        "sliding_window": sliding_window,
        "value_norm": value_norm,
        **scales,
    }


def expected(tensors, attention):
    """The reference result: mixed and both caches."""
    return window_attention(*(tensors[name] for name in NAMES), **attention)


def assert_close(outputs, wanted, tensors, tolerance, *, cleared=0):
    """Check live rows and runs, and that cache entries without a new token have not changed.

    Entries after a run, up to the next multiple of ``cleared`` positions, may have become 0.
    """
    live = tensors["block_table"].any(axis=1)
    windows = len(wanted[0]) - len(tensors["prompt_rows"])
    live = np.concatenate([np.repeat(live, windows // len(live)), tensors["prompt_rows"] >= 0])
    np.testing.assert_allclose(_wide(outputs[0])[live], _wide(wanted[0])[live], rtol=tolerance, atol=tolerance)
    for mine, theirs, name in zip(outputs[1:], wanted[1:], ("key_cache", "value_cache"), strict=True):
        mine, theirs, before = (_wide(cache)[1:] for cache in (mine, theirs, tensors[name]))
        untouched = ~((theirs != before) & ~np.isnan(theirs))
        excused = untouched & _after_runs(tensors, cleared)[1:, None, :, None] & (mine == 0)
        mine = np.where(excused, before, mine)
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance)
        np.testing.assert_array_equal(mine[untouched], before[untouched])


def _after_runs(tensors, tile):
    """The entries [blocks, block_size] after runs, up to the next multiple of ``tile`` positions."""
    table, size = tensors["prompt_table"], tensors["key_cache"].shape[2]
    unwritten = np.zeros((len(tensors["key_cache"]), size), dtype=bool)
    counts = np.diff(tensors["prompt_starts"])
    for run, end in enumerate(tensors["prompt_index"] + counts):
        if counts[run] and tile:
            positions = np.arange(end, min(-(-end // tile) * tile, table.shape[1] * size))
            unwritten[table[run, positions // size], positions % size] = True
    return unwritten


def tolerance(dtype):
    """Two units in the last place: a sum of numbers near one, each rounded a few times."""
    return 2e-5 if dtype == np.float32 else 2 * float(ml_dtypes.finfo(dtype).eps)


def _wide(values):
    return values.astype(np.float64)

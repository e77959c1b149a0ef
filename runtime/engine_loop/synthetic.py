"""Synthetic acceptance for benchmarks: mask rows that make verification accept a given mean of drafted tokens.

``num_accepted`` is the rule; ``accept_synthetic`` applies it to one row with masks of its own.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.requests.running import RunningRequest

_STEP = 0x9E3779B97F4A7C15
_MIXES = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # shifts and factors


def accept_synthetic(mean: float, running: RunningRequest, tokens: Sequence[int], masks: MaskRows, first: int) -> int:
    """Mask a window so that a round emits ``mean`` tokens on average; the last one is sampled from the target.

    Each drafted token is accepted with one probability if those before it were, by the request's seed. Windows of
    ``num_draft_tokens`` give the mean, and shorter ones less, as with real drafts. ``tokens``: the drafted tokens,
    which the rows from ``first`` on allow. The row of each accepted token allows that token only; the next row forbids
    its own drafted token. Returns how many tokens are accepted.
    """
    rate = synthetic_rate(mean, running.request.num_draft_tokens)
    seed, length = np.array([running.request.seed % 2**64], np.uint64), np.array([len(running.tokens)])
    count = int(num_accepted(np.array([rate]), seed, length, np.array([len(tokens)]))[0])
    for at in range(count):
        masks.allow_only(first + at, tokens[at])
    if count < len(tokens):
        masks.forbid(first + count, tokens[count])
    return count


def num_accepted(
    rates: npt.NDArray[np.float64],
    seeds: npt.NDArray[np.uint64],
    lengths: npt.NDArray[np.int64],
    counts: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """Return how many of ``counts`` drafted tokens each row accepts. All arguments have the shape [rows].

    Args:
        rates: of each row, see ``synthetic_rate``.
        seeds, lengths: of the request, and of its text.

    The uniform of a row is SplitMix64 (Steele, Lea and Flood 2014).
    """
    bits = seeds + (lengths + 1).astype(np.uint64) * np.uint64(_STEP)
    for shift, factor in _MIXES:
        bits = (bits ^ bits >> np.uint64(shift)) * np.uint64(factor)
    coins = ((bits ^ bits >> np.uint64(31)) >> np.uint64(11)).astype(np.float64) / (1 << 53)
    chances = np.cumprod(np.repeat(rates[:, None], max(1, int(counts.max(initial=0))), axis=1), axis=1)
    accepted: npt.NDArray[np.int64] = np.minimum((coins[:, None] < chances).sum(axis=1), counts)
    return accepted


@lru_cache
def synthetic_rate(mean: float, window: int) -> float:
    """Return the acceptance probability of a token with which windows of ``window`` tokens emit ``mean`` tokens."""
    low, high = 0.0, 1.0
    if mean >= window + 1:
        return high
    while high - low > 1e-9:
        rate = (low + high) / 2
        if sum(rate**at for at in range(window + 1)) < mean:
            low = rate
        else:
            high = rate
    return low

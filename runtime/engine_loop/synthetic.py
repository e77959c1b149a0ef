"""Synthetic acceptance for benchmarks: mask rows that make verification accept a given mean of drafted tokens."""

from collections.abc import Sequence

import numpy as np

from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.requests.running import RunningRequest

_BITS = np.left_shift(1, range(32)).astype(np.int32)


def accept_synthetic(mean: float, running: RunningRequest, tokens: Sequence[int], masks: MaskRows, first: int) -> int:
    """Mask a window so that a round emits ``mean`` tokens on average; the last one is sampled from the target.

    The number of tokens is ``mean`` rounded up or down, by the request's seed. ``tokens``: the drafted tokens, which
    the rows from ``first`` on allow. The row of each accepted token allows that token only; the next row forbids its
    own drafted token. Returns how many tokens are accepted.
    """
    from tandemrt.plugins.reference.noise import accept_coin  # only benchmarks get here

    whole, fraction = divmod(mean - 1, 1)
    more = fraction > 0 and fraction > accept_coin(running.request.seed, len(running.tokens))  # the coin is slow
    count = min(int(whole) + int(more), len(tokens))
    for at in range(count):
        row, token = masks.writable(first + at), tokens[at]
        row.fill(0)
        row[token >> 5] = _BITS[token & 31]
    if count < len(tokens):
        row, token = masks.writable(first + count), tokens[count]
        row[token >> 5] &= ~_BITS[token & 31]
        if not row[token >> 5] and not row.any():  # no other token is allowed
            row[token >> 5] = _BITS[token & 31]
    return count

"""The rule *synthetic*, for benchmarks: acceptance of a given mean, by mask rows; verification works as ever."""

from collections.abc import Sequence

from tandemrt.plugins.reference.noise import accept_coin
from tandemrt.runtime.constraints import bitmask
from tandemrt.runtime.constraints.masks import MaskRows
from tandemrt.runtime.requests.running import Running


def accept(mean: float, running: Running, tokens: Sequence[int], masks: MaskRows, first: int) -> int:
    """Let verification accept so many of ``tokens`` that a round emits ``mean`` tokens, the last one its own.

    As many as are nearest to the mean, so the seed decides between two numbers. ``tokens`` are those drafted that the
    rows from ``first`` on allow: each row becomes the one token to be accepted, the one behind them refuses its own.
    Returns how many are accepted.
    """
    whole, part = divmod(mean - 1, 1)
    more = part > 0 and part > accept_coin(running.request.seed, len(running.tokens))  # a coin takes a while
    count = min(int(whole) + int(more), len(tokens))
    for at in range(count):
        bitmask.allow_only(masks.own(first + at), tokens[at])
    if count < len(tokens):
        row = masks.own(first + count)
        bitmask.forbid(row, tokens[count])
        if not row[tokens[count] >> 5] and not row.any():  # nothing else may follow
            bitmask.allow(row, tokens[count])
    return count

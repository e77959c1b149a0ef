"""Drafts by lookup in the request's own text: the tokens after the latest earlier occurrence of the newest ones.

Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from collections.abc import Sequence
from itertools import cycle, islice

from tandemrt.runtime.device.buffers import RoundBuffers, write_drafts
from tandemrt.runtime.drafters.none import NullHooks
from tandemrt.runtime.requests.running import RunningRequest
from tandemrt.runtime.requests.slots import Round


class NgramDrafter(NullHooks):
    """Looks up drafts on the host, after the commit. Rows without a match have no drafts."""

    drafts_before_commit = False
    caches = ()

    def __init__(self, buffers: RoundBuffers, *, window: int, shortest: int, longest: int) -> None:
        self.window = window
        self.max_length: int | None = None
        self._buffers = buffers
        self._sizes = range(longest, shortest - 1, -1)
        self._indexes: dict[int, NgramIndex] = {}

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join."""
        self._indexes[running.slot] = NgramIndex(running.tokens, self._sizes)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._indexes.pop(slot, None)

    def cached_tokens(self, running: RunningRequest) -> int:
        """See Drafter.cached_tokens."""
        return len(running.tokens)

    def window_needed(self, round_: Round) -> int:
        """See Drafter.window_needed. 0 without a match: the round then costs one token."""
        return max(map(len, self._lookups(round_).values()), default=0)

    def propose(self, round_: Round) -> None:
        """See Drafter.propose."""
        write_drafts(self._buffers.draft_tokens, round_.batch, round_.window, self._lookups(round_))

    def _lookups(self, round_: Round) -> dict[int, list[int]]:
        """Return the fast-forward tokens of each slot, continued by lookup."""
        drafts = {}
        for slot, running in round_.rows.items():
            fast_forward = list(round_.fast_forward.get(slot, ()))
            count = max(0, round_.max_drafted(running) - len(fast_forward))
            drafts[slot] = fast_forward + self._indexes[slot].lookup(count, fast_forward)
        return drafts


class NgramIndex:
    """The latest end of each n-gram in a growing text. The time per token does not depend on the text's length."""

    def __init__(self, tokens: Sequence[int], sizes: Sequence[int]) -> None:
        self._tokens = tokens  # the request's own list, which grows between calls
        self._sizes = sizes  # longest first
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams that end before this position are in the index

    def lookup(self, count: int, following: Sequence[int] = ()) -> list[int]:
        """Return ``count`` tokens that followed the latest earlier occurrence of the longest suffix; [] without one.

        The suffix is that of the text plus ``following``. If the text ends too early, the tokens repeat from the start
        of the match, so that a periodic text continues its period.
        """
        if not count:
            return []
        newest = len(self._tokens)
        for end in range(self._indexed, newest):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self._tokens[end - size : end])] = end
        self._indexed = newest
        suffix = [*self._tokens[max(0, newest - self._sizes[0]) :], *following]
        for size in self._sizes:
            start = self._ends.get(tuple(suffix[-size:])) if size < newest + len(following) else None
            if start is not None:
                return list(islice(cycle(self._tokens[start : start + count]), count))
        return []

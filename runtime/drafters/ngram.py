"""Drafts by lookup: what followed the last time the newest tokens stood in the request's own text.

Prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from collections.abc import Sequence
from itertools import cycle, islice

from tandemrt.runtime.drafters.base import Unmoved
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.round.buffers import RoundBuffers, write_drafts
from tandemrt.runtime.round.round import Round


class NgramDrafter(Unmoved):
    """Looks on the host, after the commit; costs no engine. Rows without a match draft nothing."""

    ahead = False
    caches = ()

    def __init__(self, buffers: RoundBuffers, *, window: int, shortest: int, longest: int) -> None:
        self.window = window
        self.reach: int | None = None
        self._buffers = buffers
        self._sizes = range(longest, shortest - 1, -1)
        self._indexes: dict[int, NgramIndex] = {}

    def join(self, running: Running) -> None:
        """See SlotListener.join."""
        self._indexes[running.slot] = NgramIndex(running.tokens, self._sizes)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        self._indexes.pop(slot, None)

    def held(self, running: Running) -> int:
        """See Drafter.held."""
        return len(running.tokens)

    def needed(self, this: Round) -> int:
        """See Drafter.needed. Without a match nothing is drafted, and the round costs what plain decoding costs."""
        return max(map(len, self._lookups(this).values()), default=0)

    def propose(self, this: Round) -> None:
        """See Drafter.propose."""
        write_drafts(self._buffers.draft_tokens, this.batch, this.window, self._lookups(this))

    def _lookups(self, this: Round) -> dict[int, list[int]]:
        """What is forced and what is found behind it, by slot."""
        found = {}
        for slot, running in this.rows.items():
            forced = list(this.forced.get(slot, ()))
            count = max(0, this.most(running) - len(forced))
            found[slot] = forced + self._indexes[slot].lookup(count, forced)
        return found


class NgramIndex:
    """Where each n-gram of a growing text ended last; costs the same per token however long the text is."""

    def __init__(self, tokens: Sequence[int], sizes: Sequence[int]) -> None:
        self._tokens = tokens  # the request's own list: it grows between calls
        self._sizes = sizes  # longest first
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # ends [0, indexed) are in the index

    def lookup(self, count: int, following: Sequence[int] = ()) -> list[int]:
        """Return ``count`` tokens as they followed the latest earlier place of the longest matching suffix, if any.

        The suffix is that of the text and ``following``. Where the place reaches the end of the text, it goes on from
        its own beginning: a text that repeats itself repeats itself further.
        """
        newest = len(self._tokens)
        for end in range(self._indexed, newest):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(self._tokens[end - size : end])] = end
        self._indexed = newest
        suffix = [*self._tokens[max(0, newest - self._sizes[0]) :], *following]
        for size in self._sizes:
            found = self._ends.get(tuple(suffix[-size:])) if size < newest + len(following) else None
            if found is not None:
                return list(islice(cycle(self._tokens[found : found + count]), count))
        return []

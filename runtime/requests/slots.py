"""Who sits where: requests join slots and leave them here and nowhere else.

All who keep something per slot hear it, so nobody asks whether a slot still belongs to the request that it knew.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

from tandemrt.engines.calls import capacity
from tandemrt.engines.contract import BLOCK_SIZE
from tandemrt.engines.errors import InternalError
from tandemrt.runtime.caches.kv_cache import Room
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.requests.waiting import Waiting


class SlotListener(Protocol):
    """Keeps something per slot. Between ``join`` and ``leave`` a slot is one request's."""

    def join(self, running: Running) -> None:
        """``running`` sits in its slot from now on. If this raises it does not, and all hear that it left."""

    def leave(self, slot: int) -> None:
        """Forget who sat in ``slot``; nothing happens if it is nobody that is known here."""


class Slots:
    """``count`` slots. Iterating gives the requests in them, in the order in which they joined.

    ``room`` is asked first whether a request can join, and with the ``listeners``, in this order, hears who joins and
    leaves. ``window``: the most tokens that a round drafts; ``slack``: how many it may write behind the newest one
    (calls.slack), None: no more than these.

    A request holds memory for what it has and for what its next rounds may write, and ``grow``s with its text. Those
    in slots and those that were preempted stand in one order, that in which they came; only the youngest gives its
    memory back, so the oldest always comes to its end.

    Only the loop's thread may let requests join and leave; any thread may look who is there.
    """

    def __init__(
        self, count: int, room: Room, listeners: Sequence[SlotListener], *, window: int, slack: int | None = None
    ) -> None:
        self.count = count
        self._room = room
        self._listeners = tuple(listeners)
        self._window = window
        self._slack = window if slack is None else slack
        self._running: dict[int, Running] = {}  # in the order in which they joined

    def join(self, waiting: Waiting) -> Running | None:
        """Give the first free slot to a request. None if it must wait for room in the caches.

        A request joins whole or not at all: if anybody raises, nobody holds anything of it, and the error passes on.
        """
        slot = next((slot for slot in range(self.count) if slot not in self._running), None)
        if slot is None:
            raise InternalError(f"slots: all {self.count} are taken; a request must leave before another one joins")
        tokens, request = waiting.tokens, waiting.request
        # A round feeds the last token, and must not write a block that others read. A draft head needs the target's
        # state of the one before, which only a prefill gives.
        named = waiting.hashes
        hashes = named.first(tokens, max(0, len(tokens) - 1 - named.behind) // BLOCK_SIZE) if named else ()
        with ExitStack() as undo:
            undo.callback(self._room.leave, slot)
            cached = self._room.reserve(slot, self._needed(len(tokens), request), hashes)
            if cached is None:
                return None
            running = waiting.preempted
            if running is None:
                running = Running(waiting, slot, cached)
            else:
                running.sit(slot, cached)
            for listener in self._listeners:
                undo.callback(listener.leave, slot)  # first: one that raises half-way may hold half
                listener.join(running)
            self._running[slot] = running
            undo.pop_all()
        return running

    def grow(self, running: Running) -> bool:
        """Make sure that ``running`` has memory for its next round; False if there is too little."""
        return self._room.reserve(running.slot, self._needed(len(running.tokens), running.request)) is not None

    def know(self, running: Running, tokens: int) -> None:
        """Let others find the first ``tokens`` tokens of a text in the caches, in whole blocks; see Room.know."""
        blocks = (tokens if self._room.finds_answers else min(tokens, running.prefill_end)) // BLOCK_SIZE
        if running.hashes is not None and blocks > running.known:
            self._room.know(running.slot, running.hashes.first(running.tokens, blocks))
            running.known = blocks
        running.request.prompt_known |= not running.prefilling

    def leave(self, slot: int) -> None:
        """Free ``slot``: all hear it, also behind one who raises, whose error then passes on."""
        del self._running[slot]
        with ExitStack() as everybody:  # who is added last hears first
            for listener in reversed(self._listeners):
                everybody.callback(listener.leave, slot)
            everybody.callback(self._room.leave, slot)

    @property
    def free(self) -> int:
        """Slots that nobody sits in."""
        return self.count - len(self._running)

    def _needed(self, length: int, request: Request) -> int:
        """Tokens of memory for a text of ``length`` tokens and all that may be enqueued before the host knows more.

        That is a round which is not committed, and the one behind it.
        """
        return capacity(min(length + self._window + 1, request.length), self._slack)

    def __len__(self) -> int:
        """Requests in slots."""
        return len(self._running)

    def __iter__(self) -> Iterator[Running]:
        return iter(list(self._running.values()))

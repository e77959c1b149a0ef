"""Slots: the only place where requests join and leave slots. A round serves the requests in slots.

Listeners are notified and keep state per slot. They need not check whether a slot still belongs to the same request.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

from tandemrt.engines.contract.calls import capacity
from tandemrt.engines.contract.contract import BLOCK_SIZE, blocks_of
from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.caches.kv_cache import KVCacheManager
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.running import QueuedRequest, RunningRequest


class SlotListener(Protocol):
    """Keeps state per slot. A slot belongs to one request from ``join`` to ``leave``."""

    def join(self, running: RunningRequest) -> None:
        """``running`` joins its slot. If this raises, the join is undone and all listeners get ``leave``."""

    def leave(self, slot: int) -> None:
        """Drop the state of ``slot``. Does nothing if the listener has no state of it."""


class Slots:
    """``count`` slots. Iterating gives the requests in them, in the order in which they joined.

    ``cache_manager`` reserves memory for a request before the ``listeners`` get ``join``, in their order.
    ``num_draft_tokens`` is the largest number of draft tokens per round. ``slack`` is the largest number of tokens that
    a round may write after the newest one (calls.slack); None: ``num_draft_tokens``. ``reads_prompts_late``: see
    Drafter.

    A request holds memory for its tokens and for those that its next rounds may write; ``grow`` extends it. Requests
    in slots and preempted ones are ordered by arrival. Only the youngest is preempted, so the oldest always finishes.

    Only the engine loop's thread may let requests join and leave; any thread may iterate.
    """

    def __init__(
        self,
        count: int,
        cache_manager: KVCacheManager,
        listeners: Sequence[SlotListener],
        *,
        num_draft_tokens: int,
        slack: int | None = None,
        reads_prompts_late: bool = False,
    ) -> None:
        self.count = count
        self._cache_manager = cache_manager
        self._listeners = tuple(listeners)
        self._num_draft_tokens = num_draft_tokens
        self._slack = num_draft_tokens if slack is None else slack
        self._reads_prompts_late = reads_prompts_late
        self._running: dict[int, RunningRequest] = {}  # in the order in which they joined

    def join(self, queued: QueuedRequest) -> RunningRequest | None:
        """Give a request the first free slot. Returns None if the caches have too little memory.

        If a listener raises, the join is undone everywhere and the exception passes on.
        """
        slot = next((slot for slot in range(self.count) if slot not in self._running), None)
        if slot is None:
            raise InternalError(f"slots: all {self.count} are taken; a request must leave before another one joins")
        tokens, request = queued.tokens, queued.request
        rereads = not self._cache_manager.caches_outputs
        # The first round writes into the last token's block, so that block must not be shared. A draft head also needs
        # the target's states of the preceding tokens, which only a prefill computes. Under the rejection rule a text
        # depends on whether its first round verifies drafts, so that round has a part of the prompt in any case.
        blocks, text = queued.hashes, request.prompt if rereads else tokens
        first_drafts_wait = self._reads_prompts_late and request.rule is Rule.REJECTION
        hashes: Sequence[bytes] = ()
        if blocks:
            after = max(blocks.lookahead, int(first_drafts_wait))
            hashes = blocks.first(text, max(0, len(text) - 1 - after) // BLOCK_SIZE)
        with ExitStack() as undo:
            undo.callback(self._cache_manager.leave, slot)
            cached = self._cache_manager.reserve(slot, self._needed(len(tokens), request), hashes)
            if cached is None:
                return None
            running = queued.preempted
            if running is None:
                running = RunningRequest(queued, slot, cached)
            else:
                running.assign_slot(slot, cached, rereads=rereads)
            for listener in self._listeners:
                undo.callback(listener.leave, slot)  # before join: one that raises may hold partial state
                listener.join(running)
            self._running[slot] = running
            undo.pop_all()
        return running

    def grow(self, running: RunningRequest) -> bool:
        """Reserve memory for the next round of ``running``; return False if there is too little."""
        return self._cache_manager.reserve(running.slot, self._needed(len(running.tokens), running.request)) is not None

    def unchanged_until(self, running: RunningRequest) -> int:
        """Return up to which length of the text ``grow`` and ``register_prefix`` have nothing to do, after both."""
        request, length = running.request, len(running.tokens)
        registered, last = running.registered_blocks, running.prefill_end // BLOCK_SIZE
        if running.prefilling or (running.hashes is not None and registered < last):
            return 0
        until = request.max_length
        if length + self._num_draft_tokens + 1 < until:
            needed = self._needed(length, request)
            until = length + BLOCK_SIZE * blocks_of(needed) - needed  # the rest of a block is reserved, too
        if running.hashes is None or not self._cache_manager.caches_outputs:
            return until
        return min(until, (registered + 1) * BLOCK_SIZE)  # the last token is in no cache

    def register_prefix(self, running: RunningRequest, tokens: int) -> None:
        """Let other requests reuse the whole blocks among the first ``tokens`` tokens of ``running``."""
        blocks = (tokens if self._cache_manager.caches_outputs else min(tokens, running.prefill_end)) // BLOCK_SIZE
        if running.hashes is not None and blocks > running.registered_blocks:
            hashes, of_prompt = running.hashes.first(running.tokens, blocks), blocks * BLOCK_SIZE <= running.prefill_end
            self._cache_manager.register_prefix(running.slot, hashes, of_prompt=of_prompt)
            running.registered_blocks = blocks
        running.request.prompt_cached |= not running.prefilling

    def leave(self, slot: int) -> None:
        """Free ``slot``. All listeners get ``leave``, even if one raises; the exception then passes on."""
        del self._running[slot]
        with ExitStack() as stack:  # callbacks run in reverse order
            for listener in reversed(self._listeners):
                stack.callback(listener.leave, slot)
            stack.callback(self._cache_manager.leave, slot)

    @property
    def reuses_whole_chunks(self) -> bool:
        """See KVCacheManager.reuses_whole_chunks."""
        return self._cache_manager.reuses_whole_chunks

    @property
    def free(self) -> int:
        """Number of free slots."""
        return self.count - len(self._running)

    @property
    def missing_tokens(self) -> int:
        """Number of prompt tokens that requests in slots have to prefill."""
        return sum(each.prefill_end - each.prefilled for each in self._running.values() if each.prefilling)

    def __len__(self) -> int:
        """Number of requests in slots."""
        return len(self._running)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(list(self._running.values()))

    def _needed(self, length: int, request: Request) -> int:
        """Return the tokens of memory for a text of ``length`` tokens and the rounds enqueued before the next commit.

        These are one uncommitted round and the one after it.
        """
        return capacity(min(length + self._num_draft_tokens + 1, request.max_length), self._slack)


class PendingValidations:
    """Requests that left their slots and wait until their finished text has been validated off the loop.

    Only the engine loop's thread adds and takes requests; any thread may iterate. ``changed`` is called, in any thread,
    when a validation is done.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._pending: list[RunningRequest] = []

    def add(self, running: RunningRequest) -> None:
        assert running.validation is not None
        self._pending = [*self._pending, running]
        running.validation.add_done_callback(lambda _: self._changed())

    def done(self, now: float) -> list[RunningRequest]:
        """Return the requests whose validation is done, and those that must end at ``now`` without it."""
        return [running for running in self._pending if _done(running, now)]

    def take(self, now: float) -> list[RunningRequest]:
        """Remove and return those that are ``done``. Validations that have not started are cancelled."""
        taken = self.done(now)
        self._pending = [running for running in self._pending if running not in taken]
        for running in taken:
            if running.validation is not None:
                running.validation.cancel()
        return taken

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._pending)


def _done(running: RunningRequest, now: float) -> bool:
    return running.validation is None or running.validation.done() or running.request.interrupted(now) is not None

"""Slots: the only place where requests join and leave slots. A round serves the requests in slots.

Listeners are notified and keep state per slot. They need not check whether a slot still belongs to the same request.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

from tandemrt.engines.contract.calls import NO_PROMPTS, Packed, capacity
from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.caches.kv_cache import KVCacheManager
from tandemrt.runtime.device.round_shape import RoundShape
from tandemrt.runtime.device.streams import HostCopy
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
    a round may write after the newest one (calls.slack); None: ``num_draft_tokens``.

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
    ) -> None:
        self.count = count
        self._cache_manager = cache_manager
        self._listeners = tuple(listeners)
        self._num_draft_tokens = num_draft_tokens
        self._slack = num_draft_tokens if slack is None else slack
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
        # the target's states of the preceding tokens, which only a prefill computes.
        blocks, text = queued.hashes, request.prompt if rereads else tokens
        hashes = blocks.first(text, max(0, len(text) - 1 - blocks.lookahead) // BLOCK_SIZE) if blocks else ()
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


@dataclass(frozen=True)
class Round:
    """The plan of a round: one step of drafting and verification, fixed before any of its work is enqueued.

    Attributes:
        rows: the requests that the round serves, by slot.
        batch: slots [0, batch) are rows of its calls; rows without a request emit nothing.
        window: drafted tokens per row.
        filters: whether any request uses top-k, top-p or min-p, see Engine.bind.
        rules: the verification rules of its requests. Rejection reads draft probabilities.
        num_proposed: tokens per row that the drafter proposes; fast-forward tokens may be more.
        prompts: prompt tokens in the packed calls of target and draft; none over a linear cache.
        mask_drafts: whether grammars mask the drafts, after the host has committed the last round.
        may_fast_forward: slots whose constraint may allow a single continuation, as far as the host knew when the round
            was planned. Its tokens are drafted without a model, after the host has committed the last round.
        fast_forward: those tokens by slot, as soon as they are computed.
        copied: drafts by slot that replace the drafter's: fast-forward tokens, continued from the text (TextLookup).
            Computed after the host has committed the last round.
        undrafted: slots whose prefill ends in this round, too late for the drafter. Their drafts depend on stale cache
            contents and are not verified; under the rejection rule the text would depend on them.
        only_fast_forward: whether fast-forward tokens fill the window of every row, so that the drafter is skipped.
        adaptive: whether the acceptance in this round adapts the length of later draft windows.
    """

    rows: Mapping[int, RunningRequest]
    batch: int
    window: int
    filters: bool
    rules: frozenset[Rule]
    num_proposed: int = 0
    prompts: Packed = NO_PROMPTS
    mask_drafts: bool = False
    may_fast_forward: frozenset[int] = frozenset()
    fast_forward: Mapping[int, Sequence[int]] = field(default_factory=dict)
    copied: Mapping[int, Sequence[int]] = field(default_factory=dict)
    undrafted: frozenset[int] = frozenset()
    only_fast_forward: bool = False
    adaptive: bool = False

    @cached_property
    def shape(self) -> RoundShape:
        """The shape of the round's calls, for a drafter that samples from probabilities."""
        return RoundShape(self.batch, self.window, self.filters, Rule.REJECTION in self.rules, self.prompts)

    @property
    def has_work(self) -> bool:
        """Whether the target has anything to compute."""
        return bool(self.rows) or self.prompts != NO_PROMPTS

    @property
    def drafts_after_commit(self) -> bool:
        """Whether the drafts need the commit of the last round."""
        return bool(self.may_fast_forward) or (self.mask_drafts and self.window > 0)

    @property
    def drafted_from_text(self) -> Mapping[int, Sequence[int]]:
        """The drafts by slot that need no drafter."""
        return {**self.fast_forward, **self.copied}

    @property
    def needs_drafter(self) -> bool:
        """Whether the drafter has to propose: no, if all rows copy or have fast-forward tokens for the whole window."""
        if not self.window or self.only_fast_forward:
            return False
        return not self.copied or any(
            slot not in self.copied and len(self.fast_forward.get(slot, ())) < self.max_drafted(running)
            for slot, running in self.rows.items()
        )

    @property
    def window_tokens(self) -> int:
        """Tokens of all rows that the target scores: the newest and the drafted ones."""
        return self.batch * (self.window + 1)

    def max_drafted(self, running: RunningRequest) -> int:
        """Drafted tokens that may be verified for ``running``."""
        return min(self.window, running.request.num_draft_tokens, running.remaining - 1)

    def can_use_drafts(self, *, copies: bool) -> bool:
        """Whether any drafted token may be verified. ``copies``: drafts may also be copied from the text."""
        return any(
            self.max_drafted(running) > 0 and (copies or slot not in self.undrafted or slot in self.may_fast_forward)
            for slot, running in self.rows.items()
        )

    def completes(self, running: RunningRequest) -> bool:
        """Whether the round surely emits the last token of ``running``. It emits at least one for each of its rows."""
        return self.rows.get(running.slot) is running and running.remaining <= 1 and not running.replay.rereading

    def num_proposed_for(self, running: RunningRequest) -> int:
        """Valid tokens that the drafter proposes for ``running``."""
        if self.only_fast_forward or running.slot in self.undrafted:
            return 0
        return min(self.num_proposed, self.max_drafted(running))

    def with_fast_forward(self) -> "Round":
        """Return the round with its fast-forward tokens, for ``may_fast_forward`` alone.

        Other slots get none, so that drafts, and a text under the rejection rule, do not depend on neighbours.

        A request that had output to process again when the round was planned may have processed it by now. It gets some
        only if the round that this one repeats did.

        The drafter is skipped where they fill what it would draft. The window shrinks to what is needed, unless the
        round has prompts, whose positions in the packed calls follow from it.
        """
        may = frozenset(
            slot
            for slot, running in self.rows.items()
            if slot in self.may_fast_forward and running.replay.fast_forward is not False
        )
        tokens = {
            slot: running.fast_forward_tokens(self.max_drafted(running)) if slot in may else []
            for slot, running in self.rows.items()
        }
        only = all(
            len(tokens[slot]) >= min(self.num_proposed, self.max_drafted(each)) for slot, each in self.rows.items()
        )
        needed = max([0 if only else self.num_proposed, *map(len, tokens.values())])
        window = needed if self.prompts == NO_PROMPTS else self.window
        return replace(self, may_fast_forward=may, fast_forward=tokens, only_fast_forward=only, window=window)

    def unfinished(self) -> "Round":
        """Return the round with the same calls, without requests that finished after it was planned."""
        left = {slot: running for slot, running in self.rows.items() if not running.finished}
        return self if len(left) == len(self.rows) else replace(self, rows=left)


@dataclass(frozen=True)
class VerifiedRound:
    """A round whose verification is enqueued; the host has not committed it.

    Attributes:
        round: its plan.
        num_verified: drafted tokens that are verified, by slot.
        num_from_drafter: verified tokens that the drafter proposed, by slot; the others are fast-forward tokens. Slots
            whose drafts were replaced by copies are missing.
        logits: [window + 1, vocab] by slot, of requests that ask for logprobs.
    """

    round: Round
    num_verified: Mapping[int, int]
    num_from_drafter: Mapping[int, int]
    logits: Mapping[int, HostCopy] = field(default_factory=dict)

    def drop(self, running: RunningRequest, *, reads_prompts_late: bool) -> "VerifiedRound":
        """Return the round with nothing to commit for ``running``, which repeats it in its next slot.

        ``reads_prompts_late``: see Drafter.
        """
        plan, slot = self.round, running.slot
        if slot in plan.rows:
            depends_on_drafts = running.request.rule is Rule.REJECTION and slot not in plan.undrafted
            running.replay.drop_round(
                fast_forward=slot in plan.may_fast_forward,
                waits_for_drafts=reads_prompts_late and depends_on_drafts,
            )
        rows = {other: row for other, row in plan.rows.items() if other != slot}
        return replace(self, round=replace(plan, rows=rows))

"""The round: propose, target, commit, fill, adjust, verify.

::

    device                              host
    propose the drafts of round r
    copy tokens r-1, drafts r ──mark──► the one wait       (copies travel on a second stream)
    target on window + 1 rows           commit round r-1: text, streams, ends of requests
                                        fill the masks of round r
    adjust ◄─────masks, draft lengths,──┤       (only if a request asks for penalties or biases)
    verify       adjusted tokens        ┘
    advance every slot by what was emitted

The host commits a round while the next one is already proposed, so it waits once per round, for both. What
verification decided is acted on by the device at once (SlotState.advance) and by the host one wait later: a request
that turns out to be finished leaves its last rows to be masked out, which emits nothing. Without overlap the target is
launched when all of the host's work is done; the tokens are the same.
"""

import gc
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandemrt.engines.errors import InternalError
from tandemrt.plugins.operators import Rule
from tandemrt.runtime.buckets import bucket
from tandemrt.runtime.buffers import Buffer, RoundBuffers
from tandemrt.runtime.cache import Room
from tandemrt.runtime.device import Clock, upload
from tandemrt.runtime.drafters.base import Drafter
from tandemrt.runtime.masks import NOTHING, MaskRows
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.request import Request
from tandemrt.runtime.scheduler import Scheduler
from tandemrt.runtime.slots import SlotState
from tandemrt.runtime.tandem import Tandem
from tandemrt.runtime.timeline import Timeline
from tandemrt.runtime.windows import Windows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Round:
    """A round on the device: which request each live slot served, and the shape of its calls."""

    rows: Mapping[int, Request]
    batch: int
    window: int
    usable: Mapping[int, int]  # drafted tokens that were verified, per slot


class Loop:
    """Runs rounds over the scheduler's slots. One thread calls ``step``; requests join and leave between rounds."""

    def __init__(
        self,
        tandem: Tandem,
        drafter: Drafter,
        scheduler: Scheduler,
        clock: Clock,
        room: Room,
        metrics: Metrics,
        timeline: Timeline,
        *,
        slots: int,
        windows: Windows,
        prefill_chunk: int,
        overlap: bool,
    ) -> None:
        self.tandem = tandem
        self.drafter = drafter
        self.scheduler = scheduler
        self.overlap = overlap
        self.metrics = metrics
        self.clock = clock
        self.room = room
        self._timeline = timeline
        self._slots = slots
        self._windows = windows
        self._buffers: RoundBuffers = tandem.buffers
        self._state: SlotState = tandem.state
        self._chunk = prefill_chunk
        assert self._buffers.bitmask.host is not None
        self._masks = MaskRows(self._buffers.bitmask.host.numpy().reshape(-1, self._buffers.words))
        self._last: Round | None = None  # verified, not yet committed

    def step(self) -> None:
        """One round, and the commit of the one before it."""
        self._leave()
        with self.metrics.timed("prefill"), self._timeline.span("prefill"):
            self._join()
        rows = {slot: r for slot, r in self.scheduler.slots() if r.prefilled == r.prefill_end}
        if not rows and self._last is None:
            self._timeline.pause()
            return
        batch, window = self._shape(rows)
        filters = any(request.filters for request in rows.values())
        early = self.overlap and self.drafter.ahead
        laws = None

        if self.drafter.ahead and window:
            laws = self._propose(rows, batch, window, filters)
        elif self.drafter.ahead:
            self.drafter.skip(rows)
        mark = self._fetch(batch, window if self.drafter.ahead else 0)
        if rows and early:
            self._score(batch, window)
        with self.metrics.timed("wait"):
            self.clock.wait(mark)
        with self.metrics.timed("commit"):
            self._commit()

        rows = {slot: r for slot, r in rows.items() if not r.finished}
        if not rows:
            return
        if window and not self.drafter.ahead:
            laws = self._propose(rows, batch, window, filters)
        if self.overlap and not early:
            self._score(batch, window)
        with self.metrics.timed("fill"):
            usable = self._fill(rows, batch, window)
        if not self.overlap:
            self._score(batch, window)
        self.clock.join()
        with self.metrics.timed("verify"), self._timeline.span("verify"):
            self.tandem.adjust(batch, window)
            self.tandem.verify(batch, window, laws, filters=filters)
        self._last = Round(rows, batch, window, usable)
        self._timeline.collect()
        self.metrics.rounds += 1
        self.metrics.waits = self.clock.waits

    def fail(self, error: Exception) -> None:
        """End every request in a slot: an engine failed, so none of them can go on."""
        self._last = None
        for slot, request in self.scheduler.slots():
            try:
                self._end(slot, request, "error", failure=error)
            except Exception:  # a device that is gone refuses this as well
                log.exception("slot %d could not be emptied", slot)

    def close(self) -> None:
        """Let go of engines, caches and buffers, so that their memory comes back now. Metrics stay readable."""
        del self.tandem, self.drafter, self.room, self._buffers, self._state
        gc.collect()  # calls that are kept by their shape refer to one another
        if self.clock.device.type == "cuda":
            torch.cuda.empty_cache()

    def _leave(self) -> None:
        """Requests that were cancelled or ran out of time leave, from the slots and from the queue."""
        now = time.monotonic()
        for slot, request in self.scheduler.slots():
            reason = request.interrupted(now)
            if reason is not None:
                self._end(slot, request, reason)
        for request in self.scheduler.drop_waiting(now):
            self._count(request)
            request.tell()

    def _join(self) -> None:
        """Waiting requests join free slots; prompts go into the caches, ``prefill_chunk`` tokens a round in all."""
        for slot, request in self.scheduler.admit(self._reserve):
            self.metrics.queue_seconds.observe(time.monotonic() - request.submitted)
            self._state.admit(slot, request.slot_params())
            upload(request.prompt, self._buffers.prompts[slot, : len(request.prompt)])
            self._place(slot, request)
        budget = self._chunk
        for slot, request in self.scheduler.slots():
            count = min(budget, request.prefill_end - request.prefilled)
            if count > 0:
                self.tandem.prefill(slot, request.prefilled, count)
                self.drafter.prefill(slot, request.prefilled, count)
                request.prefilled += count
                budget -= count
                self.metrics.prefilled += count
                self._place(slot, request)

    def _reserve(self, slot: int, request: Request) -> bool:
        # All that a request may ever hold, so that it never runs out: the last round writes a whole window, and one
        # more may be on its way before the host has seen the end.
        return self.room.reserve(slot, len(request.prompt) + request.max_tokens + self._windows.largest + 1)

    def _place(self, slot: int, request: Request) -> None:
        # A slot in prefill is a row of every round as well: it stands at its next prompt token, so what the round
        # writes behind that is written again by the next chunk, and an empty mask keeps it from emitting.
        at = request.prefilled
        self._state.place(slot, length=at, last=request.prompt[at], previous=request.prompt[max(0, at - 1)])

    def _shape(self, rows: Mapping[int, Request]) -> tuple[int, int]:
        """Rows and drafted tokens of a round's calls. Rows that no request has are masked out."""
        if not rows:
            return 0, 0
        window = min(self._windows.of(len(rows)), max(request.window for request in rows.values()))
        return bucket(max(rows) + 1, self._slots), window

    def _propose(self, rows: Mapping[int, Request], batch: int, window: int, filters: bool) -> Buffer | None:
        with self.metrics.timed("propose"), self._timeline.span("propose"):
            return self.drafter.propose(rows, batch, window, filters=filters)

    def _score(self, batch: int, window: int) -> None:
        with self.metrics.timed("target"), self._timeline.span("target"):
            self.tandem.score(batch, window)

    def _fetch(self, batch: int, window: int) -> Any:
        """Enqueue the copies the host will wait for: the last round's tokens and this round's drafts. Marks them."""
        with self.clock.copies(behind=True):
            if self._last is not None:
                self._buffers.tokens.copy_out(self._last.batch, self._last.window + 1)
                self._buffers.count.copy_out(self._last.batch)
            if window:
                self._buffers.draft_tokens.copy_out(batch, window)
        return self.clock.mark_copies()

    def _commit(self) -> None:
        """The last round's tokens become text."""
        last, self._last = self._last, None
        if last is None:
            return
        tokens = self._buffers.tokens.host_view(last.batch, last.window + 1).tolist()
        counts = self._buffers.count.host_view(last.batch).tolist()
        for slot, request in last.rows.items():
            if request.finished:  # cancelled since
                continue
            emitted = tokens[slot][: counts[slot]]
            before = len(request.tokens)
            try:
                accepted = request.commit(emitted, last.usable[slot])
                if not emitted and not request.finished:
                    raise InternalError("the target's logits are not finite at this token; check the engine's dtype")
            except Exception as error:
                self._end(slot, request, "error", failure=error)
                continue
            if accepted is not None:
                self.metrics.accept(accepted)
            self.metrics.emitted += len(emitted)
            self._keep(request, len(request.tokens) - before)
            if request.output is not None:
                self._vacate(slot)
                self._count(request)
            request.tell()

    def _fill(self, rows: Mapping[int, Request], batch: int, window: int) -> dict[int, int]:
        """Write masks, draft lengths and adjusted tokens of this round, enqueue copies. Other rows emit nothing."""
        masks = self._masks
        drafts = self._buffers.draft_tokens.host_view(batch, window).tolist()
        lengths = self._buffers.draft_len.host_view(batch)
        lengths.zero_()
        usable, adjusted = {}, {}
        for slot in range(batch):
            request, first = rows.get(slot), slot * (window + 1)
            if request is None:
                self._mute(range(first, first + window + 1))
                continue
            wanted = min(window, request.window, request.remaining - 1)
            draft = drafts[slot][:wanted]
            if -1 in draft:
                draft = draft[: draft.index(-1)]
            try:
                count = request.constraint.fill_masks(draft, masks, first)
            except Exception as error:
                self._end(slot, request, "error", failure=error)
                self._mute(range(first, first + window + 1))
                continue
            # The rejection rule must meet the refused token itself: stopping short of it, because of what it is,
            # would draw from the target where the rule draws from the residual.
            if request.rule is Rule.REJECTION:
                count = min(count + 1, len(draft))
            usable[slot] = count
            lengths[slot] = count
            if request.penalties is not None:
                adjusted[slot] = request.penalties, request.penalties.listed(request.tokens, draft[:count])
            self.metrics.drafted += len(draft)
            self.metrics.evaluated += count
            self.metrics.cut_drafts += len(draft) - count
        self._buffers.entries.write(batch, adjusted)
        with self.clock.copies(behind=False):
            self._buffers.entries.copy_in()
            words = self._buffers.words
            self._buffers.bitmask.copy_part_in(masks.changed_from * words, masks.changed * words)
            self._buffers.draft_len.copy_in(batch)
        masks.settle()
        return usable

    def _mute(self, rows: Iterable[int]) -> None:
        """Let mask rows allow nothing, so that nothing is emitted."""
        for row in rows:
            self._masks.share(row, NOTHING)

    def _end(self, slot: int, request: Request, reason: str, failure: Exception | None = None) -> None:
        request.finish(reason, failure)
        try:
            self._vacate(slot)
        finally:
            self._count(request)
            request.tell()

    def _vacate(self, slot: int) -> None:
        self.scheduler.free(slot)
        self.room.release(slot)
        self._state.vacate(slot)

    def _keep(self, request: Request, count: int) -> None:
        """Count tokens that became text, and how long they took."""
        self.metrics.kept += count
        if count <= 0:
            return
        now = time.monotonic()
        if request.newest is None:
            self.metrics.time_to_first_token_seconds.observe(now - request.submitted)
            count -= 1  # the others of a first window come with it, at no time of their own
        since = request.newest if request.newest is not None else now
        for _ in range(count):
            self.metrics.inter_token_seconds.observe((now - since) / count)
        request.newest = now

    def _count(self, request: Request) -> None:
        reason = request.finish_reason or ""
        self.metrics.finished[reason] = self.metrics.finished.get(reason, 0) + 1
        self.metrics.forced_ends += request.forced_ends
        self.metrics.boundaries_inside += request.boundaries_inside

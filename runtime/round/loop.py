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
from collections.abc import Mapping
from typing import Any

import torch

from tandemrt.engines.calls import bucket, capacity
from tandemrt.runtime.caches.kv_cache import Room
from tandemrt.runtime.device import Clock, upload
from tandemrt.runtime.drafters.base import Drafter
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.round.books import Books, Round
from tandemrt.runtime.round.buffers import Buffer, RoundBuffers
from tandemrt.runtime.round.fill import Filler
from tandemrt.runtime.round.slots import SlotState
from tandemrt.runtime.round.tandem import Tandem
from tandemrt.runtime.round.timeline import Timeline
from tandemrt.runtime.round.windows import Windows

log = logging.getLogger(__name__)


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
        self.slots = slots
        self.windows = windows
        self._buffers: RoundBuffers = tandem.buffers
        self._state: SlotState = tandem.state
        self._chunk = prefill_chunk
        self._books = Books(self._buffers, self._state, scheduler, room, metrics)
        self._filler = Filler(self._buffers, clock, self._books, metrics)
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
            last, self._last = self._last, None
            if last is not None:
                self._books.commit(last)

        rows = {slot: r for slot, r in rows.items() if not r.finished}
        if not rows:
            return
        if window and not self.drafter.ahead:
            laws = self._propose(rows, batch, window, filters)
        if self.overlap and not early:
            self._score(batch, window)
        with self.metrics.timed("fill"):
            usable = self._filler.fill(rows, batch, window)
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
                self._books.end(slot, request, "error", failure=error)
            except Exception:  # a device that is gone refuses this as well
                log.exception("slot %d could not be emptied", slot)

    def close(self) -> None:
        """Let go of engines, caches and buffers, so that their memory comes back now. Metrics stay readable."""
        del self.tandem, self.drafter, self.room, self._buffers, self._state, self._books, self._filler
        gc.collect()  # calls that are kept by their shape refer to one another
        if self.clock.device.type == "cuda":
            torch.cuda.empty_cache()

    def _leave(self) -> None:
        """Requests that were cancelled or ran out of time leave, from the slots and from the queue."""
        now = time.monotonic()
        for slot, request in self.scheduler.slots():
            reason = request.interrupted(now)
            if reason is not None:
                self._books.end(slot, request, reason)
        for request in self.scheduler.drop_waiting(now):
            self._books.close(request)

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
        # All that a request may ever hold, so that it never runs out.
        return self.room.reserve(slot, capacity(len(request.prompt) + request.max_tokens, self.windows.largest))

    def _place(self, slot: int, request: Request) -> None:
        # A slot in prefill is a row of every round as well: it stands at its next prompt token, so what the round
        # writes behind that is written again by the next chunk, and an empty mask keeps it from emitting.
        at = request.prefilled
        self._state.place(slot, length=at, last=request.prompt[at], previous=request.prompt[max(0, at - 1)])

    def _shape(self, rows: Mapping[int, Request]) -> tuple[int, int]:
        """Rows and drafted tokens of a round's calls. Rows that no request has are masked out."""
        if not rows:
            return 0, 0
        window = min(self.windows.of(len(rows)), max(request.window for request in rows.values()))
        return bucket(max(rows) + 1, self.slots), window

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

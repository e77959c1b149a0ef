"""The loop: requests leave and join, then one round, by one of two timetables.

::

    device                              host
    propose the drafts of round r
    copy tokens r-1, drafts r ──mark──► the one wait       (copies travel on a second stream)
    score window + 1 rows               commit round r-1: text, streams, ends of requests
                                        fill the masks of round r
    adjust ◄─────masks, draft lengths,──┤       (only if a request asks for penalties or biases)
    verify       adjusted tokens        ┘
    advance every slot by what was emitted

The host commits a round while the next one is already proposed, so it waits once per round, for both. What
verification decided is acted on by the device at once (SlotState.advance) and by the host one wait later: a request
that turns out to be finished leaves its last rows to be masked out, which emits nothing.

Prompts that are missing in the caches are part of the round (Prompts.begin). One without requests that decode has
prompts alone: nothing is filled or verified then.
"""

import logging
import time

from tandemrt.runtime.caches.kv_cache import Room
from tandemrt.runtime.device import Clock
from tandemrt.runtime.drafters.base import Drafter
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import SlotListener, Slots
from tandemrt.runtime.requests.waiting import Dropped
from tandemrt.runtime.round.commit import Committer
from tandemrt.runtime.round.fill import Filler
from tandemrt.runtime.round.growth import Growth
from tandemrt.runtime.round.prompts import Prompts
from tandemrt.runtime.round.round import Round, Verified
from tandemrt.runtime.round.stages import Stages
from tandemrt.runtime.round.tandem import Tandem
from tandemrt.runtime.round.timeline import Timeline
from tandemrt.runtime.round.windows import Windows

log = logging.getLogger(__name__)


class Loop:
    """Runs rounds over ``slots``. One thread calls ``step``; requests join and leave between rounds."""

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
        slack: int,
        prefill_chunk: int,
        prefill_chunk_beside: int,
        overlap: bool,
    ) -> None:
        self.tandem = tandem
        self.drafter = drafter
        self.scheduler = scheduler
        self.clock = clock
        self.room = room
        self.metrics = metrics
        self.overlap = overlap
        self.prompts = Prompts(tandem, drafter, metrics, chunk=prefill_chunk, chunk_beside=prefill_chunk_beside)
        listeners: list[SlotListener] = [scheduler, tandem.state, self.prompts, drafter, windows]
        self.slots = Slots(slots, room, listeners, window=windows.largest, slack=slack)
        self._timeline = timeline
        self.windows = windows
        self._committer = Committer(tandem.buffers, self.slots, scheduler.checks, metrics)
        self._growth = Growth(self.slots, scheduler, drafter, self._committer, metrics)
        filler = Filler(tandem.buffers, clock, self._committer, metrics, drafter.reach)
        self._stages = Stages(tandem, drafter, filler, self._committer, clock, metrics, timeline)
        self._last: Verified | None = None

    def step(self) -> None:
        """One round, and the commit of the one before it."""
        started, prefilled = time.perf_counter(), self.metrics.prefilled
        self._leave()
        self._last = self._growth.grow(self._last)
        this = self._begin()
        last, self._last = self._last, None
        if this.works:
            # The tokens that follow by force are known behind the commit, and the drafts of the round behind them too.
            waits = this.waits or (last is not None and last.round.waits)
            timetable = self._overlapped if self.overlap and not waits else self._in_lockstep
            self._last = timetable(this, last, self.drafter.ahead and not waits)
            # With overlap a step takes as long as the target of the round before and the drafts of this one.
            if self._last is not None and last is not None and self.metrics.prefilled == prefilled and not waits:
                one, two = (each.round for each in (last, self._last))
                if not self.overlap or (one.batch, one.window) == (two.batch, two.window):
                    self.windows.costs.note(two.batch, two.window, time.perf_counter() - started)
        elif last is not None:
            self._stages.commit(last, self._stages.fetch(None, last))
        else:
            self._timeline.pause()

    def _overlapped(self, this: Round, last: Verified | None, ahead: bool) -> Verified | None:
        """The target runs while the host commits and fills. A drafter that reads the text lets both wait for it."""
        run = self._stages
        draft_probs = run.propose(this) if ahead else None
        mark = run.fetch(this if ahead else None, last)
        if ahead:
            run.score(this)
        run.commit(last, mark)
        this = this.remaining()
        if not ahead and this.works:
            draft_probs = run.propose(this)
            run.score(this)
        if not this.rows:
            return None
        return run.verify(this, draft_probs, run.fill(this, draft_probs))

    def _in_lockstep(self, this: Round, last: Verified | None, ahead: bool) -> Verified | None:
        """The target runs when all of the host's work is done. The tokens are the same."""
        run = self._stages
        draft_probs = run.propose(this) if ahead else None
        mark = run.fetch(this if ahead else None, last)
        run.commit(last, mark)
        this = this.remaining()
        if not this.works:
            return None
        if not ahead:
            this = run.foresee(this)
            draft_probs = run.propose(this)
            run.await_drafts(this)
        filled = run.fill(this, draft_probs) if this.rows else {}
        run.score(this)
        return run.verify(this, draft_probs, filled) if this.rows else None

    def fail(self, error: BaseException) -> bool:
        """End every request in a slot: an engine failed, so none of them can go on. False if nobody was there."""
        self._last = None
        ended = list(self.slots)
        for running in ended:
            self._committer.end(running, "error", failure=error)
        return bool(ended)

    def die(self, error: BaseException) -> None:
        """End every request, also those in the queue, and take no more: ``error`` is nobody's, so it is everybody's."""
        queued = self.scheduler.die(error)
        self.fail(error)
        for running in self.scheduler.checks:
            self._committer.settle(running, "error", error)
        for waiting in queued:
            self._committer.drop(Dropped(waiting, "error", error))

    def _leave(self) -> None:
        """Requests leave that were cancelled or ran out of time, from the slots and the queue, or were checked."""
        now = time.monotonic()
        for running in self.slots:
            reason = running.request.interrupted(now)
            if reason is not None:
                self._committer.end(running, reason)
        for running in self.scheduler.checks.take(now):
            self._committer.settle(running, running.request.interrupted(now))
        for dropped in self.scheduler.drop_waiting(now):
            self._committer.drop(dropped)

    def _begin(self) -> Round:
        """Waiting requests join free slots, and a round is made for all who are there."""
        with self.metrics.timed("prefill"), self._timeline.span("prefill"):
            joined, failed = self.scheduler.admit(self.slots)
            for running in joined:
                self.metrics.cached += running.cached
                if not running.preemptions:
                    self.metrics.queue_seconds.observe(time.monotonic() - running.request.submitted)
            if failed is not None:
                waiting, error = failed
                log.error("a request could not join a slot, it ends with an error", exc_info=error)
                self._committer.drop(Dropped(waiting, "error", error))
            return self.prompts.begin(self.slots, self.windows)

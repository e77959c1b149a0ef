"""The engine loop. A step ends requests, lets others join, and runs one round: draft, score, verify.

There are two schedules. Overlap schedule::

    device                              host
    propose the drafts of round r       deliver round r-2: texts, counts, streams
    copy drafts r to the host           wait for tokens r-1; commit them, end requests
    score window + 1 rows               wait for drafts r
                                        write the masks of round r
    adjust ◄─────masks, draft lengths,──┤       (only if a request has penalties or biases)
    verify       adjusted tokens        ┘
    copy tokens r to the host, advance every slot by them, and let the drafter read prompts

Copies run on a second stream. The host commits round r-1 after drafts and target of round r are enqueued. The device
uses the result of a round at once (SlotState.advance), but the host reads it one round later. The rows of a
request that has finished in between get empty masks, and emit nothing. What no later round depends on is delivered
while the device is busy with the next one. If the host waited long for tokens r-1 and the call of round r reads many
prompt tokens, it delivers their texts before it writes masks.

The synchronous schedule runs the same steps with the same results, but the target starts after the masks are written.

A round also processes prompt tokens that are not cached (RoundPlanner). If no request decodes, it verifies nothing.
"""

import logging
import time
from contextlib import nullcontext

from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.caches.kv_cache import KVCacheManager
from tandemrt.runtime.device.streams import Streams
from tandemrt.runtime.device.timeline import Timeline
from tandemrt.runtime.engine_loop.commit import Committer
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.engine_loop.drafter import Drafter, Lookup
from tandemrt.runtime.engine_loop.planner import RoundPlanner
from tandemrt.runtime.engine_loop.preemption import Preemption
from tandemrt.runtime.engine_loop.stages import RoundStages
from tandemrt.runtime.engine_loop.steady_rows import SteadyRows
from tandemrt.runtime.engine_loop.target import TargetRunner
from tandemrt.runtime.engine_loop.verify_inputs import VerifyInputWriter
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.round import Round, VerifiedRound
from tandemrt.runtime.requests.running import DroppedRequest
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import SlotListener, Slots

log = logging.getLogger(__name__)

_WAITED_COMMITS = 3.0  # how much longer a round takes whose target waits for a commit, in commits
_LONG_WAIT_S = 0.003  # longer than texts of 64 requests take to deliver
_STEP = 0.05  # weight of a step in the share of commits


class EngineLoop:
    """Runs rounds over ``slots``. One thread calls ``step``; requests join and leave between rounds."""

    def __init__(
        self,
        target: TargetRunner,
        drafter: Drafter,
        lookup: Lookup | None,
        scheduler: Scheduler,
        streams: Streams,
        cache_manager: KVCacheManager,
        metrics: Metrics,
        timeline: Timeline,
        *,
        slots: int,
        draft_windows: DraftWindowPlanner,
        slack: int,
        prefill_chunk: int,
        prefill_chunk_while_decoding: int,
        overlap: bool,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.lookup = lookup
        self.scheduler = scheduler
        self.streams = streams
        self.cache_manager = cache_manager
        self.metrics = metrics
        self.overlap = overlap
        self.draft_windows = draft_windows
        self.planner = RoundPlanner(
            target,
            drafter,
            metrics,
            chunk=prefill_chunk,
            chunk_while_decoding=prefill_chunk_while_decoding,
            lookup=lookup,
        )
        steady = SteadyRows(slots)
        listeners: list[SlotListener] = [scheduler, target.state, drafter, draft_windows, steady]
        listeners += [] if target.images is None else [target.images]
        listeners += [] if lookup is None else [lookup]
        self.slots = Slots(
            slots,
            cache_manager,
            listeners,
            num_draft_tokens=draft_windows.largest,
            slack=slack,
            reads_prompts_late=drafter.reads_prompts_late,
        )
        self._timeline = timeline
        observed = lookup if drafter.window else None
        self._committer = Committer(
            target.buffers, self.slots, steady, scheduler.validations, draft_windows, metrics, observed
        )
        self._preemption = Preemption(self.slots, scheduler, drafter, self._committer, metrics)
        self._verify_inputs = VerifyInputWriter(
            target.buffers, streams, steady, self._committer.end, metrics, drafter.max_length
        )
        self._stages = RoundStages(
            target, drafter, lookup, self._verify_inputs, self._committer, streams, metrics, timeline
        )
        target.on_failure(scheduler.fail)
        target.end_waits(scheduler.overdue)
        self._last: VerifiedRound | None = None  # verified on the device, not committed by the host
        self._runs_ahead = not device_of(streams.device).on_host  # a step enqueues work and returns
        self._prompts_in_flight = False  # whether the last step has enqueued a round that nothing waits for
        self._prompt_tokens = 0  # of the last step
        self._served = False  # whether a request was in a slot during the last step
        self._commit_share = 0.0  # of the time of recent steps

    @property
    def idle(self) -> bool:
        """Whether all slots are free and no round is in flight."""
        return not len(self.slots) and self._last is None

    def step(self) -> None:
        """Run one round and commit the round before it."""
        idle = self._runs_ahead and self._last is None and not self._prompts_in_flight
        if idle or (self._runs_ahead and 2 * self._prompt_tokens >= self.planner.chunk):
            # Admitting prompts for another call takes less time than the call that keeps the device busy.
            wanted = self.planner.most_tokens(self.slots, self._last) - self.slots.missing_tokens
            self.scheduler.gather(wanted, busy=not idle)
        with self.scheduler.arrivals.preparing() if idle else nullcontext():
            self._step()

    def _step(self) -> None:
        started, prefilled, committed = time.perf_counter(), self.metrics.prefilled, self.metrics.seconds["commit"]
        waited = self.metrics.seconds["wait"]
        self._served = len(self.slots) > 0
        self._end_requests()
        self._last = self._preemption.reserve_memory(self._last)
        after_last = self._last is not None and self._last.round.drafts_after_commit
        after_last |= self.lookup is not None and self.drafter.behind
        round_ = self._plan_round(after_last=after_last)
        self._served |= round_.has_work
        last, self._last = self._last, None
        if round_.has_work:
            # Fast-forward tokens depend on the committed text, and so do the drafts of the round after them.
            after_commit = round_.drafts_after_commit or after_last
            schedule = self._overlapped if self.overlap and not after_commit else self._synchronous
            self._last = schedule(round_, last, not after_commit and not self._looks_up_first)
            if last is not None and self._last is not None and self.metrics.seconds["wait"] - waited > _LONG_WAIT_S:
                self._stages.deliver()  # the host would only wait for the device meanwhile
            seconds = time.perf_counter() - started
            self._commit_share += _STEP * ((self.metrics.seconds["commit"] - committed) / seconds - self._commit_share)
            if round_.adaptive and not after_commit and self.metrics.prefilled == prefilled:
                self._observe_duration(last, self._last, seconds)
        elif last is not None:
            self._stages.commit(last)
        else:
            self._timeline.pause()
        if last is not None and self._last is None:  # no later commit may follow
            self._stages.deliver()
        self._prompts_in_flight = round_.has_work and self._last is None
        self._prompt_tokens = self.metrics.prefilled - prefilled
        if self.idle:  # rounds of the warm-up may follow, which use free slots
            self._flush_slots()

    @property
    def _looks_up_first(self) -> bool:
        """Whether copies from the text, which need the commit, are looked up before the drafter runs.

        Then the drafter is skipped where they fill all windows. With overlap it runs while the host would only wait.
        """
        return self.lookup is not None and not (self.overlap and self.drafter.window)

    def _overlapped(self, round_: Round, last: VerifiedRound | None, draft_first: bool) -> VerifiedRound | None:
        """Run the target while the host commits the last round and writes masks.

        If drafts may be copied from the text, the target runs after the commit.
        """
        stages = self._stages
        draft_probs = stages.propose(round_) if draft_first else None
        round_ = stages.drafted(round_) if draft_first else round_
        drafts = stages.fetch_drafts(round_) if draft_first else None
        if not round_.may_copy:
            stages.score(round_)
        stages.deliver()
        waited = self.metrics.seconds["wait"]
        stages.commit(last, drafts)
        begun = self.metrics.seconds["wait"] - waited > _LONG_WAIT_S and not round_.may_copy
        if begun and round_.prompts.prompt_tokens > round_.window_tokens:
            stages.deliver()  # the device has just begun a long call, at whose end it needs masks
        round_ = round_.unfinished()
        if round_.may_copy and round_.has_work:
            round_ = stages.look_up(round_)
            draft_probs = draft_probs if draft_first else stages.propose(round_)
            stages.replace_drafts(round_)
            stages.score(round_)
        if not round_.rows:
            stages.read_prompts(round_)
            return None
        return stages.verify(round_, draft_probs, stages.write_inputs(round_, draft_probs))

    def _synchronous(self, round_: Round, last: VerifiedRound | None, draft_first: bool) -> VerifiedRound | None:
        """Run the target after the host has committed the last round and written masks."""
        stages = self._stages
        draft_probs = stages.propose(round_) if draft_first else None
        round_ = stages.drafted(round_) if draft_first else round_
        stages.commit(last, stages.fetch_drafts(round_) if draft_first else None)
        stages.deliver()
        round_ = round_.unfinished()
        if not round_.has_work:
            return None
        if not draft_first:
            round_ = stages.read_text(round_)
            draft_probs = stages.propose(round_)
            round_ = stages.drafted(round_)
            stages.wait_for_drafts(round_)
            stages.replace_drafts(round_)
        drafts = stages.write_inputs(round_, draft_probs) if round_.rows else None
        stages.score(round_)
        if drafts is None:
            stages.read_prompts(round_)
            return None
        return stages.verify(round_, draft_probs, drafts)

    def fail(self, error: BaseException) -> bool:
        """End every request in a slot with ``error``, because an engine failed.

        Return False if no request was in a slot during the step, also none that has ended in it.
        """
        self._last = None
        ended = list(self.slots)
        for running in ended:
            self._committer.end(running, Finish("error", error))
        served, self._served = self._served, False
        return served or bool(ended)

    def die(self, error: BaseException) -> None:
        """End every request with ``error``, also those in the queue, and accept no more."""
        queued = self.scheduler.die(error)
        self.fail(error)
        for running in self.scheduler.validations:
            self._committer.finish_validated(running, Finish("error", error))
        for waiting in queued:
            self._committer.drop(DroppedRequest(waiting, Finish("error", error)))

    def close(self) -> None:
        """End the threads of the loop; no step may follow."""
        self._verify_inputs.close()

    def _end_requests(self) -> None:
        """End requests that were cancelled, timed out or checked, in slots and in the queue."""
        now = time.monotonic()
        for running in self.slots:
            finish = running.request.interrupted(now)
            if finish is not None:
                self._committer.end(running, finish)
        for running in self.scheduler.validations.take(now):
            self._committer.finish_validated(running, running.request.interrupted(now))
        for dropped in self.scheduler.drop_queued(now):
            self._committer.drop(dropped)

    def _plan_round(self, *, after_last: bool) -> Round:
        """Let waiting requests join free slots, and plan a round for all requests in slots.

        ``after_last``: whether the target waits for the commit of the last round.
        """
        with self.metrics.timed("prefill"), self._timeline.span("prefill"):
            prompt_tokens = self.planner.most_tokens(self.slots, self._last)
            joined, failed = self.scheduler.join_ready(self.slots, prompt_tokens)
            for running in joined:
                self.metrics.cached += running.cached
                if not running.preemptions:
                    running.request.joined = time.monotonic()
                    self.metrics.queue_seconds.observe(running.request.joined - running.request.submitted)
                    self.metrics.prompt_tokens.observe(len(running.request.prompt))
            if failed is not None:
                waiting, error = failed
                log.error("a request could not join a slot, it ends with an error", exc_info=error)
                self._committer.drop(DroppedRequest(waiting, Finish("error", error)))
            self.cache_manager.flush()
            wait = _WAITED_COMMITS * self._commit_share if self.overlap and not after_last else None
            round_ = self.planner.plan(self.slots, self.draft_windows, self._last, wait=wait)
            for running in round_.rows.values():
                running.replay.mark_planned()
            return round_

    def _flush_slots(self) -> None:
        """Upload memory and values of the slots that requests have joined or left."""
        self.cache_manager.flush()
        self.target.state.flush()

    def _observe_duration(self, last: VerifiedRound | None, verified: VerifiedRound | None, seconds: float) -> None:
        """Record the duration of a step for adaptive draft windows.

        An overlapped step takes the target's part of the last round and the drafts of this one, so it counts only where
        both have one shape.
        """
        if last is None or verified is None or (self.drafter.window and verified.round.copied):
            return
        if verified.round.missed and verified.round.window:  # the drafter has caught up
            return
        before, now = last.round, verified.round
        if not self.overlap or (before.batch, before.window) == (now.batch, now.window):
            self.draft_windows.costs.observe(now.batch, now.window, seconds)

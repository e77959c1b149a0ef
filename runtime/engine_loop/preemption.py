"""Preemption: reserve cache memory for the next round, and return the youngest requests to the queue if it is short."""

import logging
from collections import deque

from tandemrt.runtime.engine_loop.commit import Committer
from tandemrt.runtime.engine_loop.drafter import Drafter
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.round import VerifiedRound
from tandemrt.runtime.requests.running import RunningRequest
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import Slots

log = logging.getLogger(__name__)


class Preemption:
    """Reserves cache memory for the next round, preempts requests if memory is short, and registers prefixes.

    Memory goes to the oldest request first; the youngest one is preempted.

    A preempted request leaves its slot and returns to the queue. Later it is prefilled again, except for blocks that
    are still cached. Tokens that the round in flight decides for it are dropped; Replay says what rounds do again.
    """

    def __init__(
        self,
        slots: Slots,
        scheduler: Scheduler,
        drafter: Drafter,
        committer: Committer,
        metrics: Metrics,
    ) -> None:
        self._slots = slots
        self._scheduler = scheduler
        self._drafter = drafter
        self._committer = committer
        self._metrics = metrics

    def reserve_memory(self, last: VerifiedRound | None) -> VerifiedRound | None:
        """Reserve the memory of the next round; return ``last``, the round in flight, without preempted requests."""
        queue = deque(self._slots)  # the oldest first
        while queue:
            running = queue.popleft()
            if running.finished or len(running.tokens) <= running.unchanged_until:  # as in most rounds
                continue
            try:
                self._register_prefix(running)
                while not self._slots.grow(running):
                    youngest = queue.pop() if queue else running
                    if last is not None:
                        last = last.drop(youngest, reads_prompts_late=self._drafter.reads_prompts_late)
                    self._preempt(youngest)
                    if youngest is running or running.finished:
                        break
                else:
                    running.unchanged_until = self._slots.unchanged_until(running)
            except BaseException as error:  # ends only this request
                self._committer.end(running, Finish("error", error))
        return last

    def _register_prefix(self, running: RunningRequest) -> None:
        """Register the tokens that are in the caches of both models.

        Earlier steps have enqueued all calls that write them. ``running.tokens`` has no drafted token that was not
        accepted.
        """
        in_target = running.prefilled if running.prefilling else len(running.tokens) - 1
        self._slots.register_prefix(running, min(in_target, self._drafter.cached_tokens(running)))

    def _preempt(self, running: RunningRequest) -> None:
        self._committer.deliver()  # the text up to here, which the request may process again; may end any request
        if running.finished:
            return
        self._metrics.preemptions += 1
        self._scheduler.preempt(running.preempt())
        try:
            self._slots.leave(running.slot)
        except BaseException:
            log.exception("preemption: freeing slot %s failed; its request continues later", running.slot)

"""Memory that follows the texts: before a round every request in a slot gets what it may write, the oldest first."""

import logging
from collections import deque

from tandemrt.runtime.drafters.base import Drafter
from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.requests.scheduler import Scheduler
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.round.commit import Committer
from tandemrt.runtime.round.round import Verified

log = logging.getLogger(__name__)


class Growth:
    """Lets texts grow in the caches and be found there. Where memory is short, the youngest request gives its back.

    What a preempted request had is prefilled again when it goes on (or found: what it gave back is taken last). What
    the round in flight decides for it is not committed: the same noise decides it again.
    """

    def __init__(
        self, slots: Slots, scheduler: Scheduler, drafter: Drafter, committer: Committer, metrics: Metrics
    ) -> None:
        self._slots = slots
        self._scheduler = scheduler
        self._drafter = drafter
        self._committer = committer
        self._metrics = metrics

    def grow(self, last: Verified | None) -> Verified | None:
        """Make memory for the next round; ``last`` is the one in flight. Returns it without those preempted."""
        queue = deque(self._slots)  # the oldest first
        while queue:
            running = queue.popleft()
            try:
                self._know(running)
                while not self._slots.grow(running):
                    youngest = queue.pop() if queue else running
                    last = last and last.without(youngest.slot)
                    self._preempt(youngest)
                    if youngest is running:
                        break
            except BaseException as error:  # it is this request's, whatever it is
                self._committer.end(running, "error", error)
        return last

    def _know(self, running: Running) -> None:
        """Let others find what both models' caches hold of a text.

        All calls that wrote it have been enqueued in steps before this one. Tokens that were drafted and not accepted
        are not in ``running.tokens``.
        """
        in_target = running.prefilled if running.prefilling else len(running.tokens) - 1
        self._slots.know(running, min(in_target, self._drafter.held(running)))

    def _preempt(self, running: Running) -> None:
        self._metrics.preemptions += 1
        self._scheduler.preempt(running.preempt())
        try:
            self._slots.leave(running.slot)
        except BaseException:
            log.exception("a request gave its slot back, and something failed with it; it goes on later")

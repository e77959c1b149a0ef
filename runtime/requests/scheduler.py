"""Scheduler: a bounded queue of requests for the slots, fair to clients."""

import threading
import time
from collections.abc import Sequence
from itertools import chain, islice, takewhile
from typing import NamedTuple

from tandemrt.engines.validation.errors import Closed, InternalError, QueueFull, named
from tandemrt.runtime.requests.arrivals import Arrivals
from tandemrt.runtime.requests.fair_queue import FairQueue, pick_displaced
from tandemrt.runtime.requests.request import Finish, Request
from tandemrt.runtime.requests.running import DroppedRequest, QueuedRequest, RunningRequest
from tandemrt.runtime.requests.slots import PendingValidations, Slots


class JoinedRequests(NamedTuple):
    """Requests that joined a slot, and the one after them whose join raised, if any."""

    joined: list[RunningRequest]
    failed: tuple[QueuedRequest, BaseException] | None


class Scheduler:
    """The request queue. As a SlotListener it also tracks the requests in slots.

    ``submit``, ``wake``, ``overdue``, ``fail`` and ``close`` may be called from any thread, everything else from the
    engine loop's only.

    Attributes:
        validations: requests that left their slots and wait for their text to be validated.
        arrivals: requests on their way into the queue.
    """

    def __init__(self, slots: int, queue_limit: int) -> None:
        self.queue_limit = queue_limit
        self._slots = slots
        self._in_slots: dict[int, Request] = {}
        self._preempted: list[QueuedRequest] = []  # the oldest first; they go before the others
        self._waiting: list[QueuedRequest] = []
        self._submissions: list[Sequence[QueuedRequest]] = []  # calls of ``submit`` that wait for queue room, in order
        self._joining: list[QueuedRequest] = []  # waiting requests that are joining a slot right now
        self._displaced: list[DroppedRequest] = []  # left a full queue, and were not notified yet
        self.validations = PendingValidations(self.wake)
        self.arrivals = Arrivals()
        self._fair_queue = FairQueue()
        self._changed = threading.Condition()
        self._closed = False
        self._loop_error: BaseException | None = None  # ended the engine loop
        self._out_of_memory = False  # whether the last ``join_ready`` met a request with too little cache memory

    def submit(self, *requests: QueuedRequest, block: bool) -> None:
        """Queue all requests of one prompt, or none.

        If the queue is full and ``block`` is set, wait for room in order of arrival, so that small submissions do not
        starve a large one. If it is full and ``block`` is not set, displace requests: for each request that is too many
        the newest request of the client with the most waiting requests leaves the queue with QueueFull, if that client
        has more waiting requests than the submitting client then has. Else raise QueueFull. No request is displaced for
        room that earlier submissions wait for.

        Requests that free slots can take in the next round do not count as waiting, unless a request lacked cache
        memory in the last round. Preempted requests do not count either, since they were queued before.

        A request that is cancelled or overdue stops waiting for room. Requests that get a place start to compile their
        grammar; others never do.

        Raises:
            QueueFull: see above.
            Closed: the scheduler is closed.
            InternalError: the engine loop has ended with an error, also while this call waits.
        """
        request = requests[0].request
        compiling = [each.constraints for each in requests if not each.constraints.done()]
        with self._changed:
            self._submissions.append(requests)
            try:
                while self._closed or self._too_many(requests):
                    if self._loop_error is not None:
                        raise InternalError(f"the loop has ended ({named(self._loop_error)}); open the bundle again")
                    if self._closed:
                        raise Closed("this runtime was closed; open the bundle again")
                    if request.interrupted(time.monotonic()):
                        break  # needs no room: the next ``drop_queued`` returns it
                    if not block:
                        self._displace(requests)
                        break
                    self._changed.wait(_seconds_until(request.deadline))
                self._waiting += requests
            finally:
                self._submissions.remove(requests)
                self._changed.notify_all()
        for constraints in compiling:
            constraints.add_done_callback(lambda _: self.wake())
        requests[0].prepare()

    def wake(self) -> None:
        """Let ``wait_for_work`` check again, for example after a grammar compiled or a request was cancelled."""
        with self._changed:
            self._changed.notify_all()

    def gather(self, prompt_tokens: int, *, busy: bool) -> None:
        """Wait for requests that are being admitted, until the queue has ``prompt_tokens`` tokens. See Arrivals."""
        self.arrivals.gather(lambda: sum(len(each.request.prompt) for each in self._waiting), prompt_tokens, busy=busy)

    def join_ready(self, slots: Slots, prompt_tokens: int) -> JoinedRequests:
        """Let ready requests join free slots, in fair order; a request whose grammar compiles delays no other.

        No more join once the requests in slots have ``prompt_tokens`` tokens to prefill, which is enough for a round:
        a join takes time before the round, and a request of another client can still go first.

        Preempted requests go first. If a request lacks cache memory, it and all after it wait, so that small requests
        do not starve a large one. If the join of a request raises, the request leaves the queue. A request that waits
        only for its leader's prefill keeps a slot free; requests after it could otherwise hold all slots for long.
        """
        joined: list[RunningRequest] = []
        failed, out_of_memory = None, False
        with self._changed:
            if not self._waiting and not self._preempted:
                self._out_of_memory = False
                self._changed.notify_all()
                return JoinedRequests([], None)
            begun = [*self._in_slots.values(), *(each.request for each in self._preempted)]
            leading = {*begun, *(each.request for each in self._waiting if each.ready)}
            due = [each for each in self._waiting if each.ready or (each.constraints_ready and each.leader in leading)]
            ordered = islice(chain(self._preempted, self._fair_queue.order(due, begun)), slots.free)
            self._joining = [each for each in ordered if each.ready]
        missing = slots.missing_tokens
        for queued in self._joining:
            if missing >= prompt_tokens:
                break
            try:
                running = slots.join(queued)  # removes it from the queue, see ``join``
            except BaseException as error:  # fails this request alone
                failed = queued, error
                break
            if running is None:
                out_of_memory = True
                break
            joined.append(running)
            missing += running.prefill_end - running.prefilled
        with self._changed:
            self._joining, self._out_of_memory = [], out_of_memory
            if failed is not None:
                self._remove(failed[0].request)
            self._changed.notify_all()
        return JoinedRequests(joined, failed)

    def preempt(self, queued: QueuedRequest) -> None:
        """Queue a preempted request before all others; requests that were preempted earlier are younger."""
        with self._changed:
            self._preempted.insert(0, queued)

    def drop_queued(self, now: float) -> list[DroppedRequest]:
        """Remove and return the requests that were cancelled, are overdue at ``now``, were displaced, or whose
        constraints could not be created."""
        with self._changed:
            displaced, self._displaced = self._displaced, []
            ended = [dropped for each in (*self._preempted, *self._waiting) if (dropped := each.dropped(now))]
            gone = {dropped.queued for dropped in ended}
            self._preempted = [each for each in self._preempted if each not in gone]
            self._waiting = [each for each in self._waiting if each not in gone]
            self._changed.notify_all()
        for dropped in (*displaced, *ended):
            dropped.queued.constraints.cancel()  # a grammar that no request needs is not compiled
        return displaced + ended

    def overdue(self) -> bool:
        """Return whether a request that has begun must end: it is cancelled or out of time."""
        now = time.monotonic()
        with self._changed:
            return any(request.interrupted(now) for request in self._in_slots.values())

    def close(self) -> None:
        """Accept no more requests, and cancel those in slots, in the queue and being validated."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            validated = [running.request for running in self.validations]
            queued = (each.request for each in (*self._preempted, *self._waiting))
            for request in (*queued, *self._in_slots.values(), *validated):
                request.cancel()

    def fail(self, error: BaseException) -> None:
        """Accept no more requests because ``error`` lets no later step run; those that are here meet it in a step."""
        with self._changed:
            self._closed, self._loop_error = True, error
            self._changed.notify_all()

    def die(self, error: BaseException) -> list[QueuedRequest]:
        """Accept no more requests because ``error`` ended the engine loop, and empty the queue.

        Returns the requests of the queue and those that were displaced and not returned by ``drop_queued`` yet.
        """
        self.fail(error)
        with self._changed:
            displaced = [each.queued for each in self._displaced]
            queued = [*self._preempted, *self._waiting, *displaced]
            self._preempted, self._waiting, self._displaced = [], [], []
        for each in queued:
            each.constraints.cancel()
        return queued

    def join(self, running: RunningRequest) -> None:
        """See SlotListener.join."""
        with self._changed:
            self._in_slots[running.slot] = running.request
            if not running.preemptions:
                self._fair_queue.mark_served(running.request)
            self._remove(running.request)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        with self._changed:
            self._in_slots.pop(slot, None)

    @property
    def closed(self) -> bool:
        """Whether no request is accepted any more: ``close`` was called, or the engine loop ended with an error."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Number of requests in the queue, preempted ones included."""
        return len(self._preempted) + len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests in slots."""
        return len(self._in_slots)

    def wait_for_work(self) -> bool:
        """Block until a slot is taken, or a request without a slot can join one or must end.

        Returns False when the scheduler is closed and no request is in a slot, in the queue or being validated.
        """
        with self._changed:
            return self._awaited(None)

    def has_work(self, *, within: float) -> bool:
        """Return whether ``wait_for_work`` would return ``within`` so many seconds, as soon as that is known."""
        with self._changed:
            return self._awaited(time.monotonic() + within) or self._closed

    def _awaited(self, end: float | None) -> bool:
        """Wait for work until ``end``, or until the scheduler is closed; return whether there is some."""
        while not self._has_work(now := time.monotonic()):
            if self._closed or (end is not None and now >= end):
                return False
            wakes = [end, *(queued.request.deadline for queued in (*self._waiting, *self.validations))]
            self._changed.wait(_seconds_until(min((wake for wake in wakes if wake is not None), default=None)))
        return True

    def _has_work(self, now: float) -> bool:
        if self._in_slots or self._displaced or self._preempted or self.validations.done(now):
            return True
        if self._closed:
            return bool(self._waiting or self.validations)
        return any(each.constraints.done() or each.request.interrupted(now) for each in self._waiting)

    def _num_can_join(self) -> int:
        return 0 if self._out_of_memory or self._preempted else self._slots - len(self._in_slots)

    def _num_submitted_before(self, newcomers: Sequence[QueuedRequest]) -> int:
        return sum(map(len, takewhile(lambda each: each is not newcomers, self._submissions)))

    def _too_many(self, newcomers: Sequence[QueuedRequest], *, alone: bool = False) -> int:
        """Return for how many of ``newcomers`` the queue has no room: after earlier submissions, or ``alone``."""
        ahead = 0 if alone else self._num_submitted_before(newcomers)
        return max(0, len(self._waiting) - self._num_can_join() + ahead + len(newcomers) - self.queue_limit)

    def _displace(self, newcomers: Sequence[QueuedRequest]) -> None:
        """Make room in a full queue. Raises QueueFull if that is not possible; no request has left then."""
        newcomer, count, too_many = newcomers[0].request, len(newcomers), self._too_many(newcomers, alone=True)
        if too_many < min(count, self._too_many(newcomers)):
            raise QueueFull(
                f"queue_limit: at most {self.queue_limit} requests may wait, and "
                f"{self._num_submitted_before(newcomers)} earlier ones wait for room; send this one again later "
                "or raise queue_limit"
            )
        full = QueueFull(
            f"queue_limit: at most {self.queue_limit} requests may wait and as many do"
            + (f", or would with {count} more" if count > 1 else "")
            + "; send this one again later or raise queue_limit"
        )
        left = [each for each in self._waiting if each not in self._joining]
        displaced: list[QueuedRequest] = []
        for _ in range(too_many):
            victim = pick_displaced(left, newcomer, count, self._in_slots.values())
            if victim is None:
                raise full
            displaced.append(victim)
            left.remove(victim)
        for each in displaced:
            self._remove(each.request)
            self._displaced.append(DroppedRequest(each, Finish("error", full)))

    def _remove(self, request: Request) -> None:
        self._preempted = [each for each in self._preempted if each.request is not request]
        self._waiting = [each for each in self._waiting if each.request is not request]


def _seconds_until(deadline: float | None) -> float | None:
    """Return the seconds to wait for ``deadline``; None: no limit."""
    return None if deadline is None else max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))

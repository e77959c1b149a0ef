"""Who runs next: a bounded queue in front of the slots, with fair turns for clients."""

import threading
import time
from collections.abc import Sequence
from itertools import chain, islice, takewhile
from typing import NamedTuple

from tandemrt.engines.errors import Closed, InternalError, QueueFull, named
from tandemrt.runtime.requests.checks import Checks
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.requests.slots import Slots
from tandemrt.runtime.requests.turns import Turns, to_displace
from tandemrt.runtime.requests.waiting import Dropped, Waiting


class Admitted(NamedTuple):
    """Requests that joined a slot, and the one behind them that could not, if there is one."""

    joined: list[Running]
    failed: tuple[Waiting, BaseException] | None


class Scheduler:
    """The queue. It hears who joins a slot and who leaves, as all do that keep something per slot (SlotListener).

    ``submit``, ``wake`` and ``close`` are called from any thread, everything else from the loop's.
    """

    def __init__(self, slots: int, queue_limit: int) -> None:
        self.queue_limit = queue_limit
        self._slots = slots
        self._taken: dict[int, Request] = {}  # the requests in slots
        self._preempted: list[Waiting] = []  # gave their slots back, and are next; the oldest first
        self._waiting: list[Waiting] = []
        self._line: list[Sequence[Waiting]] = []  # who wants to be let into the queue, first come, first served
        self._called: list[Waiting] = []  # of those that wait, who is joining a slot right now
        self._displaced: list[Dropped] = []  # had to leave a full queue, and do not know it yet
        self.checks = Checks(self.wake)  # who left a slot and has not ended
        self._turns = Turns()
        self._changed = threading.Condition()
        self._closed = False
        self._death: BaseException | None = None  # what ended the loop
        self._no_room = False  # the last time that requests were to join, one of them found no room

    def submit(self, *waiting: Waiting, block: bool) -> None:
        """Queue requests for one prompt, all of them or none. With too little room in the queue: wait for it if
        ``block``, behind those who did so before, else raise QueueFull. So those who ask for little do not keep one who
        asks for much waiting for ever.

        Instead of raising, for each that is too many the newest request of the client with the most waiting leaves,
        with QueueFull as its failure, if that client has more waiting than the one of the new requests then has. Nobody
        leaves for room that others wait for.

        Requests that free slots can take in the next round do not count as waiting; none can while one finds no room.
        Those that were preempted do not count either: they have been let in before.

        Whoever is cancelled or out of time waits no longer for room. Raises Closed once the scheduler is closed and
        InternalError once the loop has died, also for those who wait for room.
        """
        request = waiting[0].request
        with self._changed:
            self._line.append(waiting)
            try:
                while self._closed or self._too_many(waiting):
                    if self._death is not None:
                        raise InternalError(f"the loop has ended ({named(self._death)}); open the bundle again")
                    if self._closed:
                        raise Closed("this runtime was closed; open the bundle again")
                    if request.interrupted(time.monotonic()):
                        break  # needs no room: it leaves the queue at once, and is told why
                    if not block:
                        self._displace(waiting)
                        break
                    self._changed.wait(_seconds_until(request.deadline))
                self._waiting += waiting
            finally:
                self._line.remove(waiting)
                self._changed.notify_all()
        for each in waiting:
            each.enforcement.add_done_callback(lambda _: self.wake())

    def wake(self) -> None:
        """Let the loop look again: a grammar is compiled, a request cancelled."""
        with self._changed:
            self._changed.notify_all()

    def admit(self, slots: Slots) -> Admitted:
        """Let ready requests join free slots, in turns; one whose grammar is compiling keeps nobody waiting.

        Those that were preempted come first: they had their turn. If there is no room for one, it and all behind it
        wait: who needs much would else wait for ever behind those who need little. One that cannot join at all leaves
        the queue, so that it is not tried for ever. A slot stays free for one whose turn it is, while what leads it
        puts their prompt into the caches: those behind it might else keep the slots for as long as their texts take.
        """
        joined: list[Running] = []
        failed, no_room = None, False
        with self._changed:
            begun = [*self._taken.values(), *(waiting.request for waiting in self._preempted)]
            leading = {*begun, *(waiting.request for waiting in self._waiting if waiting.ready)}
            due = [each for each in self._waiting if each.ready or (each.enforced and each.leader in leading)]
            turns = islice(chain(self._preempted, self._turns.order(due, begun)), slots.free)
            self._called = [waiting for waiting in turns if waiting.ready]
        for waiting in self._called:
            try:
                running = slots.join(waiting)  # takes it out of the queue, see join
            except BaseException as error:  # it is this request's, whatever it is
                failed = waiting, error
                break
            if running is None:
                no_room = True
                break
            joined.append(running)
        with self._changed:
            self._called, self._no_room = [], no_room
            if failed is not None:
                self._remove(failed[0].request)
            self._changed.notify_all()
        return Admitted(joined, failed)

    def preempt(self, waiting: Waiting) -> None:
        """Let one go on before all others that wait: it gives its slot back, younger ones have done so before."""
        with self._changed:
            self._preempted.insert(0, waiting)

    def drop_waiting(self, now: float) -> list[Dropped]:
        """Take those out of the queue that were cancelled, are overdue, or whose constraint could not be made.

        With them come those that another client's request displaced.
        """
        with self._changed:
            displaced, self._displaced = self._displaced, []
            found = [(waiting, waiting.dropped(now)) for waiting in (*self._preempted, *self._waiting)]
            gone = [waiting for waiting, dropped in found if dropped is not None]
            self._preempted = [waiting for waiting in self._preempted if waiting not in gone]
            self._waiting = [waiting for waiting in self._waiting if waiting not in gone]
            self._changed.notify_all()
        for waiting, dropped in found:
            if dropped is not None:
                waiting.enforcement.cancel()  # a grammar that nobody waits for is not begun
        return displaced + [dropped for _, dropped in found if dropped is not None]

    def close(self) -> None:
        """Take no more requests and cancel those in slots, in the queue and being checked."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            checked = [running.request for running in self.checks]
            queued = (waiting.request for waiting in (*self._preempted, *self._waiting))
            for request in (*queued, *self._taken.values(), *checked):
                request.cancel()

    def die(self, error: BaseException) -> list[Waiting]:
        """Take no more requests, because of ``error``, and give up the queue.

        Returns who was in it, and who had to leave it and was not told yet.
        """
        with self._changed:
            self._closed, self._death = True, error
            displaced = [each.waiting for each in self._displaced]
            queued = [*self._preempted, *self._waiting, *displaced]
            self._preempted, self._waiting, self._displaced = [], [], []
            self._changed.notify_all()
        return queued

    def join(self, running: Running) -> None:
        """See SlotListener.join."""
        with self._changed:
            self._taken[running.slot] = running.request
            if not running.preemptions:
                self._turns.take(running.request)
            self._remove(running.request)

    def leave(self, slot: int) -> None:
        """See SlotListener.leave."""
        with self._changed:
            self._taken.pop(slot, None)

    @property
    def closed(self) -> bool:
        """Whether no request is taken any more: it was closed, or the loop has died."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Requests in the queue, those included that had to give their slots back."""
        return len(self._preempted) + len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in slots."""
        return len(self._taken)

    def wait_for_work(self) -> bool:
        """Block until a slot is taken, or a request without one can move or must leave. False once all work is done.

        All work is done when the scheduler is closed and nobody is left in slots and queue, or being checked.
        """
        with self._changed:
            while not self._taken:
                now = time.monotonic()
                if self._closed or self._displaced or self._preempted:
                    return bool(self._preempted or self._waiting or self._displaced or self.checks)
                if self.checks.over(now):
                    return True
                if any(each.enforcement.done() or each.request.interrupted(now) for each in self._waiting):
                    return True
                deadlines = [each.request.deadline for each in (*self._waiting, *self.checks)]
                earliest = min((each for each in deadlines if each is not None), default=None)
                self._changed.wait(_seconds_until(earliest))
            return True

    def _joining(self) -> int:
        return 0 if self._no_room or self._preempted else self._slots - len(self._taken)

    def _ahead(self, newcomers: Sequence[Waiting]) -> int:
        return sum(map(len, takewhile(lambda each: each is not newcomers, self._line)))

    def _too_many(self, newcomers: Sequence[Waiting], *, alone: bool = False) -> int:
        """How many of ``newcomers``, who stand in the line, the queue has no room for: behind those in front of them,
        or if these did not come in (``alone``)."""
        ahead = 0 if alone else self._ahead(newcomers)
        return max(0, len(self._waiting) - self._joining() + ahead + len(newcomers) - self.queue_limit)

    def _displace(self, newcomers: Sequence[Waiting]) -> None:
        """Make room in a full queue. Raises QueueFull if the ``newcomers`` have to leave, and nobody has left then."""
        newcomer, count, too_many = newcomers[0].request, len(newcomers), self._too_many(newcomers, alone=True)
        if too_many < min(count, self._too_many(newcomers)):
            raise QueueFull(
                f"queue_limit: at most {self.queue_limit} requests may wait, and {self._ahead(newcomers)} that came "
                "before this one want what room there is; send this one again later or raise queue_limit"
            )
        full = QueueFull(
            f"queue_limit: at most {self.queue_limit} requests may wait and as many do"
            + (f", or would with {count} more" if count > 1 else "")
            + "; send this one again later or raise queue_limit"
        )
        left = [waiting for waiting in self._waiting if waiting not in self._called]
        displaced: list[Waiting] = []
        for _ in range(too_many):
            found = to_displace(left, newcomer, count)
            if found is None:
                raise full
            displaced.append(found)
            left.remove(found)
        for each in displaced:
            self._remove(each.request)
            self._displaced.append(Dropped(each, "error", full))

    def _remove(self, request: Request) -> None:
        self._preempted = [waiting for waiting in self._preempted if waiting.request is not request]
        self._waiting = [waiting for waiting in self._waiting if waiting.request is not request]


def _seconds_until(deadline: float | None) -> float | None:
    """How long to wait for ``deadline``, in seconds; None: for ever."""
    return None if deadline is None else max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX))

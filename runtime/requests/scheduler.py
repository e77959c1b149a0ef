"""Which requests run now: a bounded queue in front of a fixed number of slots, first come, first served."""

import threading
import time
from collections import deque
from collections.abc import Callable

from tandemrt.engines.errors import Closed, QueueFull
from tandemrt.runtime.requests.request import Request


class Scheduler:
    """Slots and queue. ``submit`` is called from any thread, everything else from the loop's."""

    def __init__(self, slots: int, queue_limit: int) -> None:
        self.queue_limit = queue_limit
        self._slots: dict[int, Request] = {}  # in order of admission
        self._count = slots
        self._waiting: deque[Request] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._no_room = False  # the last time that requests were to join, one of them found no room

    def submit(self, request: Request, *, block: bool) -> None:
        """Queue ``request``. With the queue full: wait for room if ``block``, else raise QueueFull.

        Requests that free slots can take in the next round do not count as waiting; none can while one finds no room.

        Raises Closed once the scheduler is closed, also for those who wait for room.
        """
        with self._changed:
            while self._closed or len(self._waiting) - self._joining() >= self.queue_limit:
                if self._closed:
                    raise Closed("this runtime was closed; open the bundle again")
                if not block:
                    raise QueueFull(
                        f"queue_limit: at most {self.queue_limit} requests may wait and as many do; "
                        "send this one again later or raise queue_limit"
                    )
                self._changed.wait()
            self._waiting.append(request)
            self._changed.notify_all()
        request.pending_rules.add_done_callback(lambda _: self.wake())

    def wake(self) -> None:
        """Let the loop look again: a grammar is compiled, a request cancelled."""
        with self._changed:
            self._changed.notify_all()

    def admit(self, reserve: Callable[[int, Request], bool]) -> list[tuple[int, Request]]:
        """Give free slots to waiting requests that are ready; one whose grammar is compiling keeps nobody waiting.

        ``reserve`` makes room for a request in a slot. If it says that there is none, the request and all behind it
        wait: who needs much would else wait for ever behind those who need little. If it raises, the request has its
        slot already, so that whoever ends the requests in slots ends this one too and it is not tried for ever.
        """
        admitted: list[tuple[int, Request]] = []
        with self._changed:
            free = [slot for slot in range(self._count) if slot not in self._slots]
            ready = [r for r in self._waiting if r.pending_rules.done() and not r.pending_rules.exception()]
            self._no_room = False
            self._changed.notify_all()
            for slot, request in zip(free, ready, strict=False):
                try:
                    if not reserve(slot, request):
                        self._no_room = True
                        break
                except Exception:
                    self._seat(slot, request)
                    raise
                self._seat(slot, request)
                admitted.append((slot, request))
        return admitted

    def drop_waiting(self, now: float) -> list[Request]:
        """Finish waiting requests that were cancelled, are overdue, or whose constraint could not be made.

        Their listeners are not told yet: the caller does it, outside of the lock.
        """
        dropped = []
        with self._changed:
            for request in list(self._waiting):
                reason = request.interrupted(now)
                failure = request.pending_rules.exception() if request.pending_rules.done() else None
                if reason is not None or failure is not None:
                    self._waiting.remove(request)
                    request.finish(reason or "error", failure if isinstance(failure, Exception) else None)
                    dropped.append(request)
            self._changed.notify_all()
        return dropped

    def close(self) -> None:
        """Take no more requests and cancel those in slots and in the queue."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for request in (*self._waiting, *self._slots.values()):
                request.cancel()

    def free(self, slot: int) -> None:
        with self._changed:
            del self._slots[slot]

    def slots(self) -> list[tuple[int, Request]]:
        """The requests in slots and their slot numbers, in order of admission."""
        return list(self._slots.items())

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def wait_for_work(self) -> bool:
        """Block until a slot is taken, or a waiting request can move or must leave. False once all work is done.

        All work is done when the scheduler is closed and nothing is left in slots and queue.
        """
        with self._changed:
            while not self._slots:
                now = time.monotonic()
                if self._closed:
                    return bool(self._waiting)
                if any(r.pending_rules.done() or r.interrupted(now) for r in self._waiting):
                    return True
                deadlines = [r.deadline for r in self._waiting if r.deadline is not None]
                self._changed.wait(min(min(deadlines) - now, threading.TIMEOUT_MAX) if deadlines else None)
            return True

    def _joining(self) -> int:
        return 0 if self._no_room else self._count - len(self._slots)

    def _seat(self, slot: int, request: Request) -> None:
        self._waiting.remove(request)
        request.start()
        self._slots[slot] = request

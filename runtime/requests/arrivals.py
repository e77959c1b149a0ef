"""Bursts of requests: their prompts share the first calls of an idle device, and no other thread delays the first.

Prompts of a burst are admitted one after another. If the loop began with the first one, its call would process that
prompt alone. It would also wait for the interpreter at each of its calls into the device, about 0.4 ms each, while
other threads admit the other prompts, and the device would wait with it. While the device is busy with a large call of
prompts, the next call can wait for the rest of the burst, instead of taking the few prompts that are there.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

GATHER_S = 0.01  # the loop waits so long at most, once per burst: prompts of 1,000 tokens take 0.3 ms each
PAUSE_S = 0.002  # and so long at most for the next request: a slow admission delays no other request for longer
GIVE_WAY_S = 0.005  # threads that admit wait so long at most; the loop prepares a round in 2 to 4 ms
_FIRST_POLL_S = 0.00005  # a lone request is queued shortly before its admission ends
_POLL_S = 0.0003  # each poll takes the interpreter from a thread that admits


class Arrivals:
    """Requests that threads are admitting, and whether the engine loop is preparing work for an idle device."""

    def __init__(self, *, gather_s: float = GATHER_S, pause_s: float = PAUSE_S, give_way_s: float = GIVE_WAY_S) -> None:
        self._gather_s = gather_s
        self._pause_s = pause_s
        self._give_way_s = give_way_s
        self._admitting = 0
        self._lock = threading.Lock()
        self._loop: int | None = None  # the thread that prepares
        self._prepared = threading.Event()
        self._prepared.set()

    @contextmanager
    def admitting(self) -> Iterator[None]:
        """Mark that this thread admits and queues a request. First waits while the loop prepares a round."""
        if self._loop != threading.get_ident():  # a listener in the loop's thread may send a request
            self._prepared.wait(self._give_way_s)
        with self._lock:
            self._admitting += 1
        try:
            yield
        finally:
            with self._lock:
                self._admitting -= 1

    def gather(self, queued: Callable[[], int], enough: int, *, busy: bool = False) -> None:
        """Wait while other threads admit requests and ``queued()`` grows, up to ``enough``, for a bounded time.

        A thread that sends many requests admits none for a moment between two of them. So where the queue has grown
        from one request to more since the last look, or the device is ``busy``, the loop looks once more.
        """
        begun, poll_s, last, looks_again = time.monotonic(), _FIRST_POLL_S, 0, busy
        grown = begun
        while (count := queued()) < enough and (self._admitting or looks_again or 0 < last < count):
            now, looks_again = time.monotonic(), False
            grown = now if count > last else grown
            if now - begun > self._gather_s or now - grown > self._pause_s:
                return
            last = count
            time.sleep(poll_s)
            poll_s = _POLL_S

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Mark that the loop prepares a round for an idle device. Threads that begin to admit wait meanwhile."""
        self._loop = threading.get_ident()
        self._prepared.clear()
        try:
            yield
        finally:
            self._loop = None
            self._prepared.set()

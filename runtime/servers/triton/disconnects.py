"""Cancel the requests of clients that cancelled or disconnected."""

import logging
import threading
import time

from tandemrt.runtime.servers.triton.response_stream import ResponseStream
from tandemrt.runtime.workers.threads import start

log = logging.getLogger(__name__)

_INTERVAL_S = 0.005  # about one round
_IDLE_PER_POLL = 8


class DisconnectMonitor:
    """A thread that polls the server about open requests every few milliseconds, while there are any.

    A poll is a call to another process. Each turn polls all active requests, which hold a slot, and a few idle ones in
    rotation. So a slot is freed at once when its client disconnects, however many requests wait.
    """

    def __init__(self) -> None:
        self._open: list[ResponseStream] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tandemrt-watch", daemon=True)
        start(self._thread, "disconnects")

    def add(self, stream: ResponseStream) -> None:
        with self._changed:
            self._open.append(stream)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._open = [stream for stream in self._open if not stream.done]
                while not self._open and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                active = [stream for stream in self._open if stream.active]
                idle = [stream for stream in self._open if not stream.active]
                polled, rest = idle[:_IDLE_PER_POLL], idle[_IDLE_PER_POLL:]
                self._open = active + rest + polled
            start = time.perf_counter()
            for stream in active + polled:
                try:
                    if stream.client_cancelled():
                        stream.cancel()
                except BaseException:  # other requests need this thread
                    log.exception("the connection of a client could not be checked; its request continues")
            time.sleep(max(_INTERVAL_S, time.perf_counter() - start))  # poll at most half of the time

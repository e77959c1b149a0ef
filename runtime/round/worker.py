"""The thread that runs the loop, and the door requests come in by."""

import logging
import threading

from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.round.loop import Loop

log = logging.getLogger(__name__)


class Worker:
    """Runs rounds while there is work. Started by the first request, stopped by ``close``."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    def submit(self, request: Request, *, block: bool) -> None:
        """Queue ``request``. Raises QueueFull unless ``block``, and Closed once closed."""
        with self._starting:  # before the request is queued: whoever closes must find the thread to wait for
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tandemrt-loop", daemon=True)
                self._thread.start()
        self._loop.scheduler.submit(request, block=block)

    def close(self) -> None:
        """Cancel what is running or waiting, stop the thread and let go of the engines. Safe to call twice."""
        self._loop.scheduler.close()
        if self._thread is threading.current_thread():
            return
        with self._closing:
            if self._closed:
                return
            if self._thread is not None:
                self._thread.join()
            self._loop.close()
            self._closed = True

    def _run(self) -> None:
        with self._loop.clock.active():
            while self._loop.scheduler.wait_for_work():
                try:
                    self._loop.step()
                except Exception as error:
                    log.exception("a round failed; its requests end with an error")
                    self._loop.fail(error)

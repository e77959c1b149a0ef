"""The thread that runs the loop, and the door requests come in by."""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

from tandemrt.engines.errors import InternalError
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
        """Queue ``request``. Raises QueueFull unless ``block``, and InternalError once closed."""
        self._start()  # before the request is queued: whoever closes must find the thread to wait for
        self._loop.scheduler.submit(request, block=block)

    def prepare(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the loop's thread before the first request, and wait for it. Raises what it raises.

        Raises InternalError when requests came first.
        """
        done: Future[None] = Future()
        if not self._start(work, done):
            raise InternalError("the loop's thread runs already; prepare it before the first request")
        done.result()

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

    def _start(self, work: Callable[[], None] = lambda: None, done: "Future[None] | None" = None) -> bool:
        """Start the loop's thread; False if it was there."""
        with self._starting:
            if self._thread is not None:
                return False
            arguments = (work, done or Future())
            self._thread = threading.Thread(target=self._run, args=arguments, name="tandemrt-loop", daemon=True)
            self._thread.start()
            return True

    def _run(self, work: Callable[[], None], done: "Future[None]") -> None:
        with self._loop.clock.active():
            try:
                work()
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)
            while self._loop.scheduler.wait_for_work():
                try:
                    self._loop.step()
                except Exception as error:
                    log.exception("a round failed; its requests end with an error")
                    self._loop.fail(error)

"""The thread that runs the loop, and the door requests come in by."""

import gc
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future

import torch

from tandemrt.engines.errors import Closed, InternalError
from tandemrt.runtime.requests.waiting import Waiting
from tandemrt.runtime.round.loop import Loop

log = logging.getLogger(__name__)


class Worker:
    """Runs rounds while there is work. Started by the first request, stopped by ``close``."""

    def __init__(self, loop: Loop) -> None:
        self._loop: Loop | None = loop  # None once closed
        self._scheduler = loop.scheduler
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closing = threading.Lock()

    @property
    def loop(self) -> Loop:
        """The loop. Raises Closed once closed."""
        if self._loop is None:
            raise Closed("this runtime was closed; open the bundle again")
        return self._loop

    def submit(self, waiting: Waiting, *, block: bool) -> None:
        """Queue a request. Raises QueueFull unless ``block``, and Closed once closed."""
        self._start()  # before the request is queued: whoever closes must find the thread to wait for
        self._scheduler.submit(waiting, block=block)

    def prepare(self, work: Callable[[], None]) -> None:
        """Run ``work`` in the loop's thread before the first request, and wait for it. Raises what it raises.

        Raises InternalError when requests came first, and Closed once closed.
        """
        done: Future[None] = Future()
        if not self._start(work, done):
            raise InternalError("the loop's thread runs already; prepare it before the first request")
        done.result()

    def close(self) -> None:
        """Cancel what is running or waiting, stop the thread and let go of the loop. Safe to call twice.

        The memory of engines, caches and buffers comes back now, unless somebody else holds the loop.
        """
        self._scheduler.close()
        if self._thread is threading.current_thread():
            return
        with self._closing:
            if self._loop is None:
                return
            if self._thread is not None:
                self._thread.join()
            device, self._loop = self._loop.clock.device, None
            gc.collect()  # calls that are kept by their shape refer to one another
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def _start(self, work: Callable[[], None] = lambda: None, done: "Future[None] | None" = None) -> bool:
        """Start the loop's thread; False if it was there."""
        with self._starting:
            if self._thread is not None:
                return False
            arguments = (self.loop, work, done or Future())
            self._thread = threading.Thread(target=_run, args=arguments, name="tandemrt-loop", daemon=True)
            self._thread.start()
            return True


def _run(loop: Loop, work: Callable[[], None], done: "Future[None]") -> None:
    with loop.clock.active():
        try:
            work()
            done.set_result(None)
        except BaseException as error:  # whoever waits must hear of any
            done.set_exception(error)
        while loop.scheduler.wait_for_work():
            try:
                loop.step()
            except Exception as error:
                log.exception("a round failed; its requests end with an error")
                loop.fail(error)

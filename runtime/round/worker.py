"""The thread that runs the loop, and the door requests come in by."""

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

from tandemrt.engines.errors import BadRequest, Closed, InternalError
from tandemrt.plugins.tensors import torch
from tandemrt.runtime import leaving
from tandemrt.runtime.requests.waiting import Waiting
from tandemrt.runtime.round.loop import Loop

log = logging.getLogger(__name__)


class Worker:
    """Runs rounds while there is work. Started by the first request, stopped by ``close`` or ``ask_to_close``."""

    def __init__(self, loop: Loop) -> None:
        self._loop: Loop | None = loop  # None once closed
        self._scheduler = loop.scheduler
        self._thread: threading.Thread | None = None
        self._process = 0  # whose thread it is
        self._starting = threading.Lock()
        self._closing = threading.Lock()

    @property
    def loop(self) -> Loop:
        """The loop. Raises Closed once closed."""
        if self._loop is None:
            raise Closed("this runtime was closed; open the bundle again")
        return self._loop

    def require_here(self, *, waits: bool) -> None:
        """Raise Closed in a forked child, and BadRequest if the caller ``waits`` in the loop's own thread."""
        if self._elsewhere:
            raise Closed(
                f"this runtime runs in process {self._process} and its fork {os.getpid()} has none of its threads; "
                "open the bundle again in the child"
            )
        if waits and self._thread is threading.current_thread():
            raise BadRequest(
                "generate: must not be called by a listener, in the loop's own thread, which would wait for itself; "
                "use submit, or call it from another thread"
            )

    def submit(self, waiting: Waiting, *, block: bool) -> None:
        """Queue a request. Raises QueueFull unless ``block``, Closed once closed, InternalError once the loop died."""
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

        The memory of engines, caches and buffers comes back now, unless somebody else holds the loop. Called by a
        listener, in the loop's own thread, it asks and does not wait; a forked child has nothing to close.
        """
        self.ask_to_close()
        if self._elsewhere or self._thread is threading.current_thread():
            return
        with self._closing:
            if self._loop is None:
                return
            if self._thread is not None:
                leaving.join(self._thread)
            device, self._loop = self._loop.clock.device, None
            gc.collect()  # calls that are kept by their shape refer to one another
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def ask_to_close(self) -> None:
        """Cancel what is running or waiting; the thread stops by itself. Waits for nobody."""
        if not self._elsewhere:
            self._scheduler.close()

    @property
    def _elsewhere(self) -> bool:
        return self._thread is not None and self._process != os.getpid()

    def _start(self, work: Callable[[], None] = lambda: None, done: "Future[None] | None" = None) -> bool:
        """Start the loop's thread; False if it was there."""
        with self._starting:
            if self._thread is not None:
                return False
            arguments = (self.loop, work, done or Future())
            # A daemon, so that the interpreter may end while it runs; it is waited for then, see leaving.py.
            thread = threading.Thread(target=_run, args=arguments, name="tandemrt-loop", daemon=True)
            leaving.wait_for(thread, self._scheduler.close)
            self._thread, self._process = thread, os.getpid()
            thread.start()
            return True


def advance(loop: Loop) -> None:
    """One step. What fails a round ends the requests in slots; it passes on if there are none, and it is nobody's."""
    try:
        loop.step()
    except BaseException as error:
        log.exception("a round failed; its requests end with an error")
        if not loop.fail(error):
            raise


_SWITCH_S = 0.0005
"""How long another thread may keep the interpreter when the loop wants it back, which it gives up at every call into
the device or an engine. Python's own 5 ms are as long as a round: a thread that takes requests in would stop it."""


def _run(loop: Loop, work: Callable[[], None], done: "Future[None]") -> None:
    """Rounds until the scheduler is closed. What is nobody's ends the loop, and with it everybody."""
    sys.setswitchinterval(min(_SWITCH_S, sys.getswitchinterval()))
    try:
        with loop.clock.active():
            try:
                work()
                done.set_result(None)
            except BaseException as error:  # whoever waits must hear of any
                done.set_exception(error)
            while loop.scheduler.wait_for_work():
                advance(loop)
    except BaseException as error:
        log.critical("the loop has ended; all of its requests end with an error", exc_info=True)
        loop.die(error)
        if not done.done():
            done.set_exception(error)

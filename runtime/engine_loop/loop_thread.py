"""The thread that runs the engine loop, and the entry for requests from other threads."""

import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from tandemrt.engines.validation.errors import BadRequest, Closed, InternalError, RankFailed
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.engine_loop.loop import EngineLoop
from tandemrt.runtime.requests.running import QueuedRequest
from tandemrt.runtime.workers import shutdown
from tandemrt.runtime.workers.threads import start

log = logging.getLogger(__name__)

_POLL_S = 0.05
_QUIET_S = 0.25  # without requests, before work begins that a request would wait for: a part takes up to 0.6 s
_ENDED = object()
SWITCH_S = 0.0001
"""Switch interval of the interpreter: how long another thread may hold the GIL while the loop waits for it. The loop
releases the GIL at every call into the device or an engine. Python's default of 5 ms is as long as a round. While other
threads admitted 15 prompts, 0.5 ms let the first round of 16 begin 8 ms late."""


class LoopThread:
    """Runs rounds while there is work. The first request starts it; ``close`` or ``request_close`` stops it."""

    def __init__(self, loop: EngineLoop) -> None:
        self._loop: EngineLoop | None = loop  # None once closed
        self._scheduler = loop.scheduler
        self._thread: threading.Thread | None = None
        self._process = 0  # that started the thread
        self._rested = threading.Event()  # set unless work is left that the thread does while there is no request
        self._rested.set()
        self._starting = threading.Lock()
        self._closing = threading.Lock()

    @property
    def loop(self) -> EngineLoop:
        """The loop. Raises Closed once closed."""
        if self._loop is None:
            raise Closed("this runtime was closed; open the bundle again")
        return self._loop

    def wait_until_idle(self) -> None:
        """Wait until the work that ``prepare`` has left is done. Does not wait where requests delay it."""
        while not (self._rested.wait(_POLL_S) or self._forked or self._scheduler.running or self._scheduler.waiting):
            pass

    def require_usable(self, *, waits: bool) -> None:
        """Raise Closed in a forked child, and BadRequest if the caller ``waits`` in the loop's own thread."""
        if self._forked:
            raise Closed(
                f"this runtime runs in process {self._process} and its fork {os.getpid()} has none of its threads; "
                "open the bundle again in the child"
            )
        if waits and self._thread is threading.current_thread():
            raise BadRequest(
                "generate: must not be called by a listener, in the loop's own thread, which would wait for itself; "
                "use submit, or call it from another thread"
            )

    def submit(self, *waiting: QueuedRequest, block: bool) -> None:
        """Queue all requests of one prompt, or none.

        Raises QueueFull unless ``block``, Closed once closed, InternalError after the loop failed.
        """
        self._start()  # before the request is queued, so that `close` finds the thread
        self._scheduler.submit(*waiting, block=block)

    def prepare(self, work: Callable[[], Iterable[None]]) -> None:
        """Run ``work`` in the loop's thread before the first request, and wait for it. Raises what it raises.

        It returns further work, one part for each item, which the thread runs while there is no request. Raises
        InternalError after the first request, and Closed once closed.
        """
        done: Future[None] = Future()
        if not self._start(work, done):
            raise InternalError("the loop's thread runs already; prepare it before the first request")
        done.result()

    def close(self) -> None:
        """Cancel running and waiting requests, stop the thread and release the loop. Safe to call twice.

        The memory of engines, caches and buffers is freed, unless the caller holds another reference to the loop. In
        the loop's own thread (a listener) this requests the close and does not wait; in a forked child it does nothing.
        """
        self.request_close()
        if self._forked or self._thread is threading.current_thread():
            return
        with self._closing:
            if self._loop is None:
                return
            with self._starting:
                thread = self._thread
            if thread is not None:
                shutdown.join(thread)
            device, self._loop = self._loop.streams.device, None
            gc.collect()  # bound calls, cached by shape, form reference cycles
            device_of(device).release_memory()

    def request_close(self) -> None:
        """Cancel running and waiting requests without waiting; the thread stops by itself."""
        if not self._forked:
            self._scheduler.close()

    @property
    def _forked(self) -> bool:
        return self._thread is not None and self._process != os.getpid()

    def _start(self, work: Callable[[], Iterable[None]] = tuple, done: "Future[None] | None" = None) -> bool:
        """Start the loop's thread; return False if it was started before. Raises InternalError if it cannot start."""
        with self._starting:
            if self._thread is not None:
                return False
            if done is not None:
                self._rested.clear()
            arguments = (self.loop, work, done or Future(), self._rested)
            # A daemon, so that the interpreter may exit while it runs; `shutdown` joins it then.
            thread = threading.Thread(target=_run, args=arguments, name="tandemrt-loop", daemon=True)
            start(thread, "engine loop")
            self._thread, self._process = thread, os.getpid()
            shutdown.join_at_exit(thread, self._scheduler.close)
            return True


_loops_running = 0
_interval_before = 0.0
_interval_lock = threading.Lock()


@contextmanager
def _short_switch_interval() -> Iterator[None]:
    """Shorten the interpreter's switch interval while any loop runs, and restore it after the last one.

    The interval belongs to the whole process. A value that another owner sets meanwhile is left alone.
    """
    global _loops_running, _interval_before
    with _interval_lock:
        if not _loops_running:
            _interval_before = sys.getswitchinterval()
            if _interval_before > SWITCH_S:
                sys.setswitchinterval(SWITCH_S)
        _loops_running += 1
    try:
        yield
    finally:
        with _interval_lock:
            _loops_running -= 1
            ours = abs(sys.getswitchinterval() - SWITCH_S) < 2e-6  # Python keeps whole microseconds
            if not _loops_running and ours and _interval_before > SWITCH_S:
                sys.setswitchinterval(_interval_before)


def advance(loop: EngineLoop) -> None:
    """Run one step. An error ends the requests in slots with it; it is raised if there are none.

    RankFailed is always raised, because no later step could run.
    """
    try:
        loop.step()
    except BaseException as error:
        log.exception("a round failed; its requests end with an error")
        if not loop.fail(error) or isinstance(error, RankFailed):
            raise


def _run(loop: EngineLoop, work: Callable[[], Iterable[None]], done: "Future[None]", rested: threading.Event) -> None:
    """Run steps until the scheduler is closed. An error outside of any request ends the loop and all requests."""
    try:
        with _short_switch_interval(), loop.streams.active():
            rest: Iterator[None] = iter(())
            try:
                rest = _then_set(rested, work())
                done.set_result(None)
            except BaseException as error:  # `prepare` raises it
                rested.set()
                done.set_exception(error)
            while _work_comes(loop, rest):
                advance(loop)
    except BaseException as error:
        log.critical("the loop has ended; all of its requests end with an error", exc_info=True)
        loop.die(error)
        if not done.done():
            done.set_exception(error)
    finally:
        rested.set()
        loop.close()


def _then_set(event: threading.Event, items: Iterable[None]) -> Iterator[None]:
    try:
        yield from items
    finally:
        event.set()


def _work_comes(loop: EngineLoop, rest: Iterator[None]) -> bool:
    """Wait for work, and meanwhile run ``rest``; return False if the scheduler is closed instead.

    Requests that soon follow others need not wait for a part of ``rest``. If one fails, the others are left to the
    requests that need them.
    """
    seconds = _QUIET_S
    try:
        while loop.idle and not loop.scheduler.has_work(within=seconds) and next(rest, _ENDED) is not _ENDED:
            seconds = 0.0
    except RankFailed:
        raise
    except Exception:  # engines and torch share no base class
        log.exception("the loop could not warm up while it was idle")
    return loop.scheduler.wait_for_work()

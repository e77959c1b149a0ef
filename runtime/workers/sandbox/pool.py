"""A pool of worker processes, started on demand, each killed when its task reaches the time limit."""

import json
import logging
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod

from tandemrt.engines.validation.errors import BackendUnavailable, BadRequest, Closed, InternalError, QueueFull, named
from tandemrt.runtime.workers import shutdown
from tandemrt.runtime.workers.clients import Client
from tandemrt.runtime.workers.fair import WorkerShares, released_worker, remove_when_cancelled
from tandemrt.runtime.workers.sandbox.frames import WithBytes
from tandemrt.runtime.workers.threads import start

if TYPE_CHECKING:
    from tandemrt.runtime.workers.sandbox.process import Process

log = logging.getLogger(__name__)

OPEN_S = 60.0  # limit of ``opening``
_IDLE_S = 60.0  # an idle process ends after this time, to free its memory
_ANSWER_S = 0.1  # for the error of a task that reaches the deadline itself


class TooSlow(BadRequest):
    """A task took longer than its limit."""


class ProcessPool:
    """Runs tasks in at most ``processes`` processes, which start on demand.

    Each process has a thread in this process that sends it tasks and waits for the replies. ``waiting``: the maximum
    number of queued tasks; ``memory_bytes``: limit of the address space of each process; ``opening``: a module-level
    function and its arguments, which each process calls before its first task; ``idle_s``: after this time without a
    task a process ends.
    """

    def __init__(
        self,
        *,
        processes: int = 2,
        waiting: int = 256,
        memory_bytes: int = 1 << 30,
        opening: tuple[Callable[..., None], tuple[Any, ...]] | None = None,
        idle_s: float = _IDLE_S,
    ) -> None:
        self._processes = processes
        self._most_waiting = waiting
        self._memory_bytes = memory_bytes
        self._opening = opening
        self._idle_s = idle_s
        self._shares: WorkerShares[_Work] = WorkerShares(processes)
        self._threads: dict[threading.Thread, Process | None] = {}
        self._idle = 0
        self._changed = threading.Condition()
        self._closed = False

    def submit(
        self,
        client: Client,
        what: str,
        limit_s: float,
        function: Callable[..., Any],
        *arguments: Any,
        deadline: float | None = None,
        wait_s: float | None = None,
    ) -> "Future[Any]":
        """Return a future of ``function(*arguments)``. ``function``: a module-level function whose result is JSON.

        The future fails with TooSlow if the task takes longer than ``limit_s`` from its start or runs at the
        ``deadline`` (in seconds of ``time.monotonic``); with QueueFull if it gets no process within ``wait_s``; with
        BadRequest if it gets none before the deadline, needs more memory than a process has, crashes its process, or
        raises BadRequest; with ProcessLost if the process is killed; with Closed if the pool is closed. ``what`` names
        the task in these errors; ``client``: see WorkerShares. A cancelled future leaves the queue at once.

        Raises QueueFull if the queue is full, Closed if the pool is closed, InternalError if no thread can start.
        """
        begin_by = None if wait_s is None else time.monotonic() + wait_s
        work = _Work(client, what, limit_s, pickle.dumps((function, arguments)), Future(), deadline, begin_by)
        with self._changed:
            if self._closed:
                raise Closed("this runtime was closed; open the bundle again")
            if len(self._shares) >= self._most_waiting + self._idle:
                raise QueueFull(
                    f"{what}: the queue for worker processes is full ({self._most_waiting} tasks); try later"
                )
            if len(self._shares) >= self._idle and len(self._threads) < self._processes:
                self._start(what)
            self._shares.add(client, work)
            self._changed.notify()
        remove_when_cancelled(work.future, work, self._shares, self._changed)
        return work.future

    def close(self) -> None:
        """Kill the processes; unfinished futures fail with Closed. May be called twice, and from any thread."""
        with self._changed:
            self._closed = True
            stranded = self._shares.clear()
            processes = [process for process in self._threads.values() if process is not None]
            self._changed.notify_all()
        for process in processes:
            process.kill()
        for work in stranded:
            work.fail(Closed("this runtime was closed; open the bundle again"))

    def _start(self, what: str) -> None:
        """Start a thread and its process. Raises InternalError if there is no thread at all."""
        # A daemon thread does not block the exit; workers/shutdown.py joins it then.
        thread = threading.Thread(target=self._run, name="tandemrt-process", daemon=True)
        self._threads[thread] = None
        try:
            start(thread, what)
        except InternalError:
            del self._threads[thread]
            if not self._threads:
                raise
            return
        shutdown.join_at_exit(thread, _closer(WeakMethod(self.close)))

    def _run(self) -> None:
        """The main function of a thread: run tasks in its process until none arrives for ``idle_s``."""
        process: Process | None = None
        while (work := self._next()) is not None:
            process = self._run_task(work, process)
            with self._changed:
                self._shares.done(work.client)
                self._changed.notify()  # another task of this client may be allowed to start now
            work = None  # an idle thread would keep its arguments
        if process is not None:
            process.end()

    def _next(self) -> "_Work | None":
        """Wait for the next task. None: the pool was closed or idle, and this thread was removed from it."""
        end = time.monotonic() + self._idle_s
        with self._changed:
            self._idle += 1
            while (taken := self._shares.take()) is None and not self._closed and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            self._idle -= 1
            if taken is not None:
                return taken[1]
            del self._threads[threading.current_thread()]
            return None

    def _run_task(self, work: "_Work", process: "Process | None") -> "Process | None":
        """Run ``work``; return the process for the next task. All errors go to the future."""
        if not work.future.set_running_or_notify_cancel():
            return process
        limit_s = work.limit_s
        try:
            work.require_in_time()
            if process is None or not process.alive:  # a process that ended while idle is no error
                if process is not None:
                    process.end()
                process = self._started()
            limit_s = work.seconds_left()
            result = _result(work.what, process.request(pickle.dumps((limit_s, work.message)), limit_s))
        except BaseException as raised:
            error = raised
            if isinstance(raised, TimeoutError):
                error = TooSlow(f"{work.what} took longer than {limit_s:g} s; simplify it")
            if isinstance(raised, ChildProcessError):
                rule = f"{work.what} crashed its worker process ({raised}), for example by taking too much memory"
                error = BadRequest(f"{rule}; simplify it")
            if self._closed:
                error = Closed("this runtime was closed; open the bundle again")
            # Without its traceback, whose frames keep the task.
            finish = partial(work.future.set_exception, error.with_traceback(None))
        else:
            finish = partial(work.future.set_result, result)
        try:
            finish()
        except BaseException:  # other tasks need this thread and its process
            log.exception("a callback of finished work failed")
        return process

    def _started(self) -> "Process":
        from tandemrt.runtime.workers.sandbox.process import Process  # few programs need a worker process

        process = Process(self._memory_bytes)
        with self._changed:
            if not self._closed:
                self._threads[threading.current_thread()] = process
        try:
            if self._closed:
                raise Closed("this runtime was closed; open the bundle again")
            if self._opening is not None:
                message = pickle.dumps((OPEN_S, pickle.dumps(self._opening)))
                _result("opening a worker process", process.request(message, OPEN_S))
        except BaseException as error:
            process.end()
            if isinstance(error, TimeoutError | ChildProcessError | BadRequest):
                raise BackendUnavailable(f"a worker process could not be opened: {named(error)}") from error
            raise
        return process


def wait_for(task: "Future[Any]", what: str, deadline: float | None) -> Any:
    """Return the result of a submitted task; wait until ``deadline`` at most, then cancel the task.

    A thread of a FairExecutor releases its worker meanwhile. ``deadline``: in seconds of ``time.monotonic``; None: no
    limit. Raises BadRequest then, and as the task does.
    """
    with released_worker():
        wait([task], None if deadline is None else max(0.0, deadline - time.monotonic()) + _ANSWER_S)
    if not task.done():
        task.cancel()
        raise BadRequest(f"{what} did not end before the request's time ran out (timeout_s); try later")
    try:
        return task.result()
    finally:
        del task  # else a traceback keeps the future, which keeps the error of the traceback


@dataclass(frozen=True, eq=False)
class _Work:
    client: Client
    what: str
    limit_s: float
    message: bytes
    future: "Future[Any]"
    deadline: float | None
    begin_by: float | None

    def require_in_time(self) -> None:
        now = time.monotonic()
        if self.begin_by is not None and now > self.begin_by:
            raise QueueFull(f"{self.what} had to wait too long for other requests; try later")
        if self.deadline is not None and now > self.deadline:
            raise BadRequest(f"{self.what} did not begin before the request's time ran out (timeout_s); try later")

    def seconds_left(self) -> float:
        """Return the time limit of the task if it starts now."""
        if self.deadline is None:
            return self.limit_s
        return max(0.0, min(self.limit_s, self.deadline - time.monotonic()))

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def _result(what: str, reply: bytearray) -> Any:
    end = reply.index(b"\n")
    answer, content = json.loads(reply[:end]), memoryview(reply)[end + 1 :]
    if "result" in answer:
        return WithBytes(answer["result"], content) if content else answer["result"]
    if "rejected" in answer:
        raise BadRequest(answer["rejected"])
    if "memory" in answer:
        raise BadRequest(f"{what} took more memory than a worker process may use; simplify it")
    raise InternalError(f"{what}: {answer['failed']}")


def _closer(close: "WeakMethod[Callable[[], None]]") -> Callable[[], None]:
    def stop() -> None:
        if (bound := close()) is not None:
            bound()

    return stop

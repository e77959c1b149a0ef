"""A few processes for what may take long: started when they are needed, killed when their time is over."""

import json
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from weakref import WeakMethod

from tandemrt.engines.errors import BadRequest, Closed, InternalError, QueueFull
from tandemrt.runtime import leaving
from tandemrt.runtime.fair import Shares
from tandemrt.runtime.processes.process import Process

_IDLE_S = 60.0  # then a process that nobody needs gives its memory back


class ProcessPool:
    """Does work in at most ``processes`` processes. Nothing is started before the first work comes.

    Each process belongs to a thread that does nothing but wait for it. ``waiting`` bounds the work that waits for a
    process, ``memory_bytes`` the address space of each.
    """

    def __init__(self, *, processes: int = 2, waiting: int = 256, memory_bytes: int = 1 << 30) -> None:
        self._processes = processes
        self._most_waiting = waiting
        self._memory_bytes = memory_bytes
        self._shares: Shares[_Work] = Shares(processes)
        self._threads: dict[threading.Thread, Process | None] = {}
        self._idle = 0
        self._changed = threading.Condition()
        self._closed = False

    def submit(
        self, client: str, what: str, limit_s: float, function: Callable[..., Any], *arguments: Any
    ) -> "Future[Any]":
        """Return a future of ``function(*arguments)``: a function of a module, its result in the types of JSON.

        It fails with BadRequest if the work takes ``limit_s`` from where a process has begun with it, or more memory
        than a process has, or raises BadRequest; with ProcessLost if the process is killed, and with Closed.
        ``what`` names it in these errors; whose it is, ``client``, matters to Shares. Raises QueueFull while too much
        waits, and Closed once closed.
        """
        work = _Work(client, what, limit_s, pickle.dumps((function, arguments)), Future())
        with self._changed:
            if self._closed:
                raise Closed("this runtime was closed; open the bundle again")
            if len(self._shares) >= self._most_waiting + self._idle:
                raise QueueFull(
                    f"{what}: at most {self._most_waiting} may wait for a process and as many do; try later"
                )
            self._shares.add(client, work)
            if len(self._shares) > self._idle and len(self._threads) < self._processes:
                self._start()
            self._changed.notify()
        return work.future

    def close(self) -> None:
        """Kill the processes; whoever waits hears Closed. Safe to call twice, and from any thread."""
        with self._changed:
            self._closed = True
            stranded = self._shares.clear()
            processes = [process for process in self._threads.values() if process is not None]
            self._changed.notify_all()
        for process in processes:
            process.kill()
        for work in stranded:
            work.fail(Closed("this runtime was closed; open the bundle again"))

    def _start(self) -> None:
        # A daemon, so that the interpreter may end while it waits; it is waited for then, see leaving.py.
        thread = threading.Thread(target=self._run, name="tandemrt-process", daemon=True)
        self._threads[thread] = None
        leaving.wait_for(thread, _closer(WeakMethod(self.close)))
        thread.start()

    def _run(self) -> None:
        """A thread: work for its process, until there has been none for a while."""
        process: Process | None = None
        while (work := self._next()) is not None:
            process = self._do(work, process)
            with self._changed:
                self._shares.done(work.client)
                self._changed.notify()  # who waited for a share
        if process is not None:
            process.end()

    def _next(self) -> "_Work | None":
        """The next work; None if this thread is to end, and is none of the pool's from here on."""
        end = time.monotonic() + _IDLE_S
        with self._changed:
            self._idle += 1
            while (taken := self._shares.take()) is None and not self._closed and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            self._idle -= 1
            if taken is not None:
                return taken[1]
            del self._threads[threading.current_thread()]
            return None

    def _do(self, work: "_Work", process: Process | None) -> Process | None:
        """Do ``work``; return the process for the next one. Whatever is raised belongs to whoever waits for it."""
        if not work.future.set_running_or_notify_cancel():
            return process
        try:
            if process is None or not process.alive:  # nobody is blamed for one that ended while it had nothing to do
                if process is not None:
                    process.end()
                process = self._started()
            work.future.set_result(work.result(process.ask(pickle.dumps((work.limit_s, work.message)), work.limit_s)))
            return process
        except TimeoutError:
            error: BaseException = BadRequest(f"{work.what} took longer than {work.limit_s:g} s; simplify it")
        except BaseException as raised:
            error = raised
        if self._closed:
            error = Closed("this runtime was closed; open the bundle again")
        work.future.set_exception(error)
        return process

    def _started(self) -> Process:
        process = Process(self._memory_bytes)
        with self._changed:
            if not self._closed:
                self._threads[threading.current_thread()] = process
                return process
        process.end()
        raise Closed("this runtime was closed; open the bundle again")


@dataclass(frozen=True, eq=False)
class _Work:
    client: str
    what: str
    limit_s: float
    message: bytes
    future: "Future[Any]"

    def result(self, reply: bytes) -> Any:
        said = json.loads(reply)
        if "result" in said:
            return said["result"]
        if "refused" in said:
            raise BadRequest(said["refused"])
        if "memory" in said:
            raise BadRequest(f"{self.what} took more memory than a process may have; simplify it")
        raise InternalError(f"{self.what}: {said['failed']}")

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def _closer(close: "WeakMethod[Callable[[], None]]") -> Callable[[], None]:
    def stop() -> None:
        if (bound := close()) is not None:
            bound()

    return stop

"""Processes of the ranks of a tensor-parallel target: start, watch and end them, and the memory that they share.

Rank 0 is the process that starts the others. A rank ends when rank 0 closes it, and when rank 0's process ends, however
it does. If a rank ends by itself, or does not answer, rank 0 ends all of them.
"""

import atexit
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import connection, spawn
from pathlib import Path
from typing import Any

import numpy as np

from tandemrt.engines.validation.errors import RankFailed, named
from tandemrt.plugins.operators.shared_ranks import acquire
from tandemrt.runtime.workers import shutdown
from tandemrt.runtime.workers.sandbox.parent import end_with_parent
from tandemrt.runtime.workers.sandbox.process import interpreter
from tandemrt.runtime.workers.threads import start

log = logging.getLogger(__name__)

OVERDUE_S = 30.0  # how long rank 0 waits for another rank once a request is cancelled or overdue
ANSWER_S = 300.0  # how long rank 0 waits for another rank in one step; the first step of a size may compile kernels
_CLOSE_S = 5.0  # how long a rank may take to end by itself
_OPENED = ""  # the report of a rank that is ready; other reports are errors

_starting = threading.Lock()


@dataclass(frozen=True)
class Link:
    """What one rank shares with the others.

    Attributes:
        parts: memory in which ranks exchange parts of tensors.
        arrived: ``arrived[a][b]`` is a semaphore that counts the parts of rank a for rank b.
        commands: memory in which rank 0 writes commands, ``size`` bytes each, in turn.
        commanded: a semaphore that counts the commands for this rank.
        done: a semaphore that counts the commands whose memory this rank does not read any more.
        reports: the end of a pipe to rank 0.
    """

    rank: int
    parts: Any
    arrived: Sequence[Sequence[Any]]
    commands: Any
    size: int
    commanded: Any
    done: Any
    reports: Any

    def opened(self) -> None:
        """Report that this rank is ready."""
        self.reports.send(_OPENED)

    def run_commands(self, run: Callable[[np.ndarray], None]) -> None:
        """Call ``run`` with the memory of every command, until one is all zeros."""
        memory = np.frombuffer(self.commands, np.uint8).reshape(-1, self.size)
        for command in itertools.cycle(memory):
            self.commanded.acquire()
            if not command.any():
                return
            run(command)
            self.done.release()


class RankProcesses:
    """The processes of ranks 1 and up, of ``count`` ranks. Each runs ``serve(link, *arguments)``, both picklable.

    ``part_bytes``: size of the memory for parts. ``command_bytes``: size of a command. ``ahead``: how many commands
    rank 0 may write before the first of them is done. ``on_failure`` are called when a rank fails, with the error,
    before the others end. ``idle``: whether rank 0's device has finished all that it does with the other ranks; if it
    has not for ANSWER_S after the last command, the ranks fail. ``overdue``: whether a request must end, which it
    cannot while a step waits for a rank: then the ranks fail after OVERDUE_S, and at once if one of them is stopped.
    Raises RankFailed if a process cannot start, InternalError if a thread cannot.
    """

    def __init__(
        self,
        count: int,
        serve: Callable[..., None],
        arguments: tuple[Any, ...],
        part_bytes: int,
        command_bytes: int,
        *,
        ahead: int = 1,
    ) -> None:
        self.on_failure: list[Callable[[RankFailed], None]] = []
        self.idle: Callable[[], bool] = lambda: True
        self.overdue: Callable[[], bool] = lambda: False
        self._stopped: list[int] = []
        self._count = 0  # of commands
        self._ahead = ahead
        context = multiprocessing.get_context("spawn")
        self.parts = context.RawArray("B", part_bytes)
        commands = context.RawArray("B", command_bytes * ahead)
        self._commands = np.frombuffer(commands, np.uint8).reshape(ahead, command_bytes)
        self._places = itertools.cycle(self._commands)
        self.arrived = [[context.Semaphore(0) for _ in range(count)] for _ in range(count)]
        self._commanded = [context.Semaphore(0) for _ in range(count)]
        self._done = [context.Semaphore(ahead) for _ in range(count)]
        self._failure: str | None = None
        self._opened = [threading.Event() for _ in range(count)]
        self._closing = threading.Event()
        self._ending = threading.Lock()
        self._owner = os.getpid()
        self._processes: list[Any] = []
        self._reports: list[Any] = []
        atexit.register(self.close)
        shutdown.run_first()
        try:
            links = []
            for rank in range(1, count):
                reports, end = context.Pipe(duplex=False)
                self._reports.append(reports)
                shared = (self.parts, self.arrived, commands, command_bytes)
                links.append(Link(rank, *shared, self._commanded[rank], self._done[rank], end))
            started: Future[None] = Future()
            run = partial(self._start_and_watch, started, links, serve, arguments)
            start(threading.Thread(target=run, name="tandemrt-ranks", daemon=True), "ranks")
            started.result()
        except BaseException as error:
            self.close()
            if not isinstance(error, OSError):
                raise
            raise RankFailed(f"tensor_parallel: a process for a rank could not start: {error}") from error

    def wait_until_opened(self) -> None:
        """Wait until all ranks are ready. Raises RankFailed, with the reason of the rank."""
        for rank in range(1, len(self._opened)):
            while not self._opened[rank].wait(0.1):
                self.require()
        self.require()

    def command(self, write: Callable[[np.ndarray], None]) -> None:
        """Let ``write`` write a command into memory that no rank reads, and let every rank run it.

        A command is never all zeros. Raises RankFailed if a rank has failed or does not answer.
        """
        self.require()
        for rank, semaphore in enumerate(self._done[1:], 1):
            acquire(semaphore, rank, self.require)
        write(next(self._places))
        self._count += 1
        for semaphore in self._commanded[1:]:
            semaphore.release()

    def require(self, other: int = 0, waited: float = 0.0) -> None:
        """Raise RankFailed if a rank has failed. ``waited``: seconds for which rank 0 has waited for rank ``other``."""
        if waited > self._patience_s:
            self.fail(f"rank {other} has not answered for {waited:.0f} s")
        if self._closing.is_set():
            with self._ending:  # another thread may still end the ranks
                raise self._error

    def fail(self, reason: str) -> None:
        """End all ranks for ``reason``; ``require`` raises from then on."""
        with self._ending:
            if self._closing.is_set():
                return
            self._failure = reason
            self._closing.set()
            for call in self.on_failure:
                call(self._error)
            self._end(0.0)
        log.error("tensor_parallel: %s; all ranks end", reason)

    def close(self) -> None:
        """End all ranks and wait for them. Safe to call twice, and in a forked child, which has no ranks."""
        atexit.unregister(self.close)
        if os.getpid() != self._owner:
            return
        with self._ending:
            if self._closing.is_set():
                return
            self._failure = "the ranks were closed"
            self._closing.set()
            self._commands[:] = 0  # all zeros: end
            for semaphore in self._commanded[1:]:
                semaphore.release()
            self._end(_CLOSE_S)

    @property
    def problem(self) -> str | None:
        """What keeps the ranks from answering, as far as it is known."""
        if self._failure is not None:
            return self._failure
        return f"rank {self._stopped[0]} is stopped (SIGSTOP)" if self._stopped else None

    @property
    def _patience_s(self) -> float:
        return min(OVERDUE_S, ANSWER_S) if self.overdue() else ANSWER_S

    @property
    def _error(self) -> RankFailed:
        return RankFailed(f"tensor_parallel: {self._failure}; open the bundle again")

    def _unanswered(self, waited: float) -> str:
        others = range(1, len(self._done))
        late = [rank for rank in others if self._done[rank].get_value() < self._ahead] or list(others)
        named = f"rank {late[0]} has" if len(late) == 1 else f"ranks {', '.join(map(str, late))} have"
        return f"{named} not answered for {waited:.0f} s"

    def _end(self, patience_s: float) -> None:
        for process in self._processes:
            process.join(patience_s)
            if process.exitcode is None:
                process.kill()
                process.join()

    def _start_and_watch(
        self, started: "Future[None]", links: Sequence[Link], serve: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        """Start the ranks, and watch them for as long as they live: they end with the thread that started them."""
        context = multiprocessing.get_context("spawn")
        try:
            for link in links:
                name = f"tandemrt-rank-{link.rank}"
                process = context.Process(target=_run, args=(link, serve, arguments), name=name, daemon=True)
                with _without_main(), link.reports:
                    process.start()
                self._processes.append(process)
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(None)
            self._watch()
        for process in self._processes:
            connection.wait([process.sentinel])

    def _watch(self) -> None:
        """Receive reports, and notice ranks that end."""
        ranks = dict(enumerate(zip(self._processes, self._reports, strict=True), 1))
        count, since = 0, time.monotonic()
        while not self._closing.is_set():
            self._stopped = [rank for rank, (process, _) in ranks.items() if _is_stopped(process.pid)]
            if self._stopped and self.overdue():
                self.fail(f"{self.problem}, and a request had to end")
                return
            if count != self._count or self.idle():
                count, since = self._count, time.monotonic()
            elif (waited := time.monotonic() - since) > self._patience_s:
                self.fail(self._unanswered(waited))
                return
            waiting = {each: rank for rank, pair in ranks.items() for each in (pair[0].sentinel, pair[1])}
            ready = connection.wait(list(waiting), timeout=1.0)
            for rank in sorted({waiting[each] for each in ready}):
                process, reports = ranks[rank]
                if (report := _received(reports)) == _OPENED:
                    self._opened[rank].set()
                elif not self._closing.is_set():
                    process.join(_CLOSE_S if report is None else 0)
                    self.fail(f"rank {rank} failed: {report}" if report else f"rank {rank} {_end_of(process)}")
                    return


def _received(reports: Any) -> str | None:
    try:
        return str(reports.recv()) if reports.poll() else None
    except (EOFError, OSError):
        return None


def _end_of(process: Any) -> str:
    code = process.exitcode
    if code is None:
        return "closed its connection"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process; False outside of Linux."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] in "Tt"


def _run(link: Link, serve: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """The main function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt at the terminal is rank 0's, which then ends this one
    parent = multiprocessing.parent_process()
    assert parent is not None
    end_with_parent(parent.pid or 0)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        serve(link, *arguments)
    except BaseException as error:
        log.critical("rank %d failed", link.rank, exc_info=True)
        link.reports.send(named(error))
        os._exit(1)  # other threads may be in native code
    os._exit(0)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@contextmanager
def _without_main() -> Iterator[None]:
    """Start a process that does not import the caller's main module, which may have no guard, with any interpreter."""
    with _starting:
        main, executable = sys.modules["__main__"], spawn.get_executable()
        sys.modules["__main__"] = types.ModuleType("__main__")
        spawn.set_executable(interpreter())
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            spawn.set_executable(executable)

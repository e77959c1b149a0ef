"""Fair sharing of a few workers between clients: no client can occupy all of them."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Lock, local
from typing import Any, Generic, TypeVar
from weakref import ref

from tandemrt.engines.validation.errors import Closed, InternalError, QueueFull
from tandemrt.runtime.workers.clients import UNNAMED, Client, Levels, ServiceOrder
from tandemrt.runtime.workers.threads import refused

log = logging.getLogger(__name__)

MAX_BLOCKED = 64  # threads of an executor that wait for other processes, besides its workers
_thread = local()  # executor: the one whose task this thread runs

T = TypeVar("T")


class WorkerShares(Generic[T]):
    """A queue of work for ``workers`` workers. Not thread-safe.

    ServiceOrder picks the next client, whose oldest work is next. A client with a name or a user never gets the last
    worker; work of an unnamed client may use all workers.
    """

    def __init__(self, workers: int) -> None:
        self._most = max(1, workers - 1)
        self._waiting: deque[tuple[Client, T]] = deque()
        self._working: Counter[Client] = Counter()
        self._order = ServiceOrder()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, client: Client, work: T) -> None:
        self._waiting.append((client, work))

    def add_first(self, client: Client, work: T) -> None:
        """Add work that was taken and not begun; it is older than what waits."""
        self._waiting.appendleft((client, work))

    def take(self) -> tuple[Client, T] | None:
        """Return the next client and its work, or None if no work may start. The worker calls ``done`` afterwards."""
        turns = self._order.turns((client for client, _ in self._waiting), list(self._working.elements()))
        keys = {
            client: turns.key(client)
            for client in dict.fromkeys(client for client, _ in self._waiting)
            if client == UNNAMED or turns.in_service(client) < self._most
        }
        if not keys:
            return None
        first = min(keys.values())
        index = next(index for index, (client, _) in enumerate(self._waiting) if keys.get(client) == first)
        client, work = self._waiting[index]
        del self._waiting[index]
        self._working[client] += 1
        self._order.mark_served(client)
        return client, work

    def done(self, client: Client) -> None:
        """Note that a worker has finished work of ``client``."""
        self._working[client] -= 1
        if not self._working[client]:
            del self._working[client]

    def waiting(self, client: Client) -> int:
        """Return how much work of the client's sender waits; 0 for an unnamed client."""
        if client == UNNAMED:
            return 0
        clients = [each for each, _ in self._waiting]
        levels = Levels((*self._working, *clients, client))
        return sum(levels.sender(each) == levels.sender(client) for each in clients)

    def remove(self, work: T) -> None:
        """Remove ``work`` if it waits."""
        position = next((index for index, (_, each) in enumerate(self._waiting) if each is work), None)
        if position is not None:
            del self._waiting[position]

    def clear(self) -> list[T]:
        """Remove and return all queued work."""
        waiting = [work for _, work in self._waiting]
        self._waiting.clear()
        return waiting


def remove_when_cancelled(
    future: "Future[Any]", work: T, shares: WorkerShares[T], lock: AbstractContextManager[Any]
) -> None:
    """Remove ``work`` from ``shares``, under their ``lock``, as soon as ``future`` is cancelled, if it still waits."""
    waiting = ref(work)  # a future keeps its callbacks: with the work, a refused prompt would wait for a collection

    def remove(done: "Future[Any]") -> None:
        if done.cancelled() and (work := waiting()) is not None:
            with lock:
                shares.remove(work)

    future.add_done_callback(remove)


@contextmanager
def released_worker() -> Iterator[None]:
    """While the block waits for another process, another client's task may run in place of this thread's task.

    The task still counts into the share of its client. Does nothing in a thread that belongs to no FairExecutor.
    """
    executor: FairExecutor | None = getattr(_thread, "executor", None)
    if executor is None or not executor._release():
        yield
        return
    try:
        yield
    finally:
        executor._resume()


class FairExecutor:
    """A thread pool that clients share fairly (WorkerShares)."""

    def __init__(
        self,
        workers: int,
        name: str,
        *,
        most_waiting: int | None = None,
        most_blocked: int = MAX_BLOCKED,
        **options: Any,
    ) -> None:
        """Start no thread yet.

        Args:
            most_waiting: tasks of one named client that may wait.
            most_blocked: threads that wait for other processes, besides the workers; with 0, one worker is one thread.
            options: of ThreadPoolExecutor.
        """
        self._most_waiting = most_waiting
        self._most_blocked = most_blocked
        self._pool = ThreadPoolExecutor(workers + most_blocked, name, **options)
        self._workers = workers
        self._working = 0  # workers that run tasks until none is left
        self._blocked = 0  # tasks that wait for another process
        self._shares: WorkerShares[_Task] = WorkerShares(workers)
        self._lock = Lock()
        self._closed = False

    def __len__(self) -> int:
        """Number of tasks that wait for a worker."""
        return len(self._shares)

    def submit(self, client: Client, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Return a future of ``function(*arguments)``. A cancelled future leaves the queue at once.

        Raises Closed once it is shut down, QueueFull if too many tasks of the client wait. Without any thread the
        future fails with InternalError.
        """
        task = _Task(client, function, arguments)
        with self._lock:
            if self._closed:
                raise _closed()
            if self._most_waiting is not None and self._shares.waiting(client) >= self._most_waiting:
                raise QueueFull(
                    f"at most {self._most_waiting} tasks of one client may wait for a worker; send this one again later"
                )
            self._shares.add(client, task)
            error = self._start_worker()
        remove_when_cancelled(task.future, task, self._shares, self._lock)
        # Without the lock, because callbacks of futures take other locks.
        if error is not None and task.future.set_running_or_notify_cancel():
            task.future.set_exception(error)
        return task.future

    def shutdown(self, *, wait: bool) -> None:
        """Reject new work and start no more; futures of work that has not started fail with Closed."""
        with self._lock:
            self._closed = True
            stranded = self._shares.clear()
        for task in stranded:
            if task.future.set_running_or_notify_cancel():
                task.future.set_exception(_closed())
        self._pool.shutdown(wait=wait)

    def _start_worker(self) -> InternalError | None:
        """Start a worker for the next task. Return the error of a task that no worker will take.

        The caller holds the lock.
        """
        if self._working >= self._workers or (taken := self._shares.take()) is None:
            return None
        client, task = taken
        worker = _Worker(task)
        try:
            self._pool.submit(self._work, worker)
        except RuntimeError as error:
            worker.refused = True
            self._shares.done(client)
            # Without other workers no other task waits: one that finishes would take it.
            if not self._working and not self._blocked:
                return refused("worker", error)
            self._shares.add_first(client, task)
            return None
        self._working += 1
        return None

    def _release(self) -> bool:
        """Give the worker of this thread to another task. Return False if too many tasks are blocked."""
        with self._lock:
            if self._blocked == self._most_blocked:
                return False
            self._blocked += 1
            self._working -= 1
            self._start_worker()
        return True

    def _resume(self) -> None:
        with self._lock:
            self._blocked -= 1
            self._working += 1  # for a moment they may be more than there are workers

    def _work(self, worker: "_Worker") -> None:
        """The main function of a worker: run tasks until none may start."""
        if worker.refused:  # the pool keeps what it has no thread for, and runs it later
            return
        task, worker.first = worker.first, None
        _thread.executor = self
        while task is not None:
            try:
                task.run()
            except BaseException:  # other tasks need this worker
                log.exception("a callback of finished work failed")
            with self._lock:
                self._shares.done(task.client)
                taken = None if self._working > self._workers else self._shares.take()
                task = None if taken is None else taken[1]
                self._working -= task is None
        _thread.executor = None  # else the thread would keep the executor alive


@dataclass(eq=False)
class _Task:
    client: Client
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: "Future[Any]" = field(default_factory=Future)

    def run(self) -> None:
        """Set the future. Raises what its callbacks raise, but for an Exception."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function(*self.arguments)
        except BaseException as error:
            self.future.set_exception(error)
            del self  # else the future's traceback keeps the future, and with it the arguments
        else:
            self.future.set_result(result)


@dataclass(eq=False)
class _Worker:
    """``refused``: whether the pool had no thread for it."""

    first: _Task | None
    refused: bool = False


def _closed() -> Closed:
    return Closed("this runtime was closed; open the bundle again")

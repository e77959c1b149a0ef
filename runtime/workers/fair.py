"""Fair sharing of a few workers between clients: no client can occupy all of them."""

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Generic, TypeVar

from tandemrt.engines.validation.errors import Closed, QueueFull
from tandemrt.runtime.workers.clients import UNNAMED, Client, ServiceOrder
from tandemrt.runtime.workers.threads import refused

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

    def take(self) -> tuple[Client, T] | None:
        """Return the next client and its work, or None if no work may start. The worker calls ``done`` afterwards."""
        turns = self._order.turns((client for client, _ in self._waiting), list(self._working.elements()))
        keys = {
            client: turns.key(client)
            for client in dict.fromkeys(client for client, _ in self._waiting)
            if client == UNNAMED or turns.in_service[client.sender] < self._most
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
        return 0 if client == UNNAMED else sum(each.sender == client.sender for each, _ in self._waiting)

    def remove(self, work: T) -> None:
        """Remove ``work`` if it waits."""
        found = next((index for index, (_, each) in enumerate(self._waiting) if each is work), None)
        if found is not None:
            del self._waiting[found]

    def clear(self) -> list[T]:
        """Remove and return all queued work."""
        waiting = [work for _, work in self._waiting]
        self._waiting.clear()
        return waiting


class FairExecutor:
    """A thread pool that clients share fairly (WorkerShares)."""

    def __init__(self, workers: int, name: str, *, most_waiting: int | None = None, **options: Any) -> None:
        """``most_waiting``: tasks of one named client that may wait; ``options``: of ThreadPoolExecutor."""
        self._most_waiting = most_waiting
        self._pool = ThreadPoolExecutor(workers, name, **options)
        self._free = workers
        self._has_thread = False  # a thread of the pool lives until shutdown
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
            failed = self._start()
        task.future.add_done_callback(lambda future: self._remove(task) if future.cancelled() else None)
        _fail(failed)
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

    def _remove(self, task: "_Task") -> None:
        with self._lock:
            self._shares.remove(task)

    def _start(self) -> "list[tuple[_Task, RuntimeError]]":
        """Start tasks; return those without a thread, for ``_fail``. The caller holds the lock."""
        failed = []
        while self._free and (taken := self._shares.take()) is not None:
            _, task = taken
            self._free -= 1
            try:
                self._pool.submit(self._run, task)
                self._has_thread = True
            except RuntimeError as error:
                if self._has_thread:  # the task is in the pool's queue, and a running thread takes it
                    continue
                # The pool keeps the task and would run it with its next thread.
                task.dropped = True
                self._free += 1
                self._shares.done(task.client)
                failed.append((task, error))
        return failed

    def _run(self, task: "_Task") -> None:
        if task.dropped:
            return
        future = task.future
        try:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(task.function(*task.arguments))
                except BaseException as error:
                    future.set_exception(error)
        finally:
            with self._lock:
                self._free += 1
                self._shares.done(task.client)
                failed = self._start()
            _fail(failed)


@dataclass(eq=False)
class _Task:
    client: Client
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    future: "Future[Any]" = field(default_factory=Future)
    dropped: bool = False


def _fail(tasks: list[tuple[_Task, RuntimeError]]) -> None:
    """Fail tasks whose thread was refused. Without the lock, because callbacks of futures take other locks."""
    for task, error in tasks:
        if task.future.set_running_or_notify_cancel():
            task.future.set_exception(refused("worker", error))


def _closed() -> Closed:
    return Closed("this runtime was closed; open the bundle again")

"""Few workers and many clients: nobody's work keeps all of them from the others."""

from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock
from typing import Any, Generic, TypeVar

from tandemrt.engines.errors import Closed

T = TypeVar("T")


class Shares(Generic[T]):
    """Work that waits for one of ``workers``. Not for two threads at once.

    The oldest work comes first of the client that has the fewest workers. A client that has a name leaves one worker
    to the others; those without one, "", may have them all.
    """

    def __init__(self, workers: int) -> None:
        self._most = max(1, workers - 1)
        self._waiting: deque[tuple[str, T]] = deque()
        self._working: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, client: str, work: T) -> None:
        self._waiting.append((client, work))

    def take(self) -> tuple[str, T] | None:
        """The next work and whose it is, for a worker who says ``done`` behind it; None if there is none for now."""
        counts = {client: self._working[client] for client, _ in self._waiting}
        able = {client: count for client, count in counts.items() if not client or count < self._most}
        if not able:
            return None
        fewest = min(able.values())
        index = next(index for index, (client, _) in enumerate(self._waiting) if able.get(client) == fewest)
        client, work = self._waiting[index]
        del self._waiting[index]
        self._working[client] += 1
        return client, work

    def done(self, client: str) -> None:
        """A worker has done with work of ``client``."""
        self._working[client] -= 1
        if not self._working[client]:
            del self._working[client]

    def clear(self) -> list[T]:
        """Take out all that waits."""
        waiting = [work for _, work in self._waiting]
        self._waiting.clear()
        return waiting


class FairExecutor:
    """Threads that work for clients in fair shares."""

    def __init__(self, workers: int, name: str, **options: Any) -> None:
        """``options``: of ThreadPoolExecutor."""
        self._pool = ThreadPoolExecutor(workers, name, **options)
        self._free = workers
        self._shares: Shares[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = Shares(workers)
        self._lock = Lock()
        self._closed = False

    def submit(self, client: str, function: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Return a future of ``function(*arguments)``. Raises Closed once it is shut down."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise _closed()
            self._shares.add(client, (future, function, arguments))
            self._start()
        return future

    def shutdown(self, *, wait: bool) -> None:
        """Take no more work, and begin no more: who waits for what was not begun hears Closed."""
        with self._lock:
            self._closed = True
            stranded = self._shares.clear()
        for future, _, _ in stranded:
            if future.set_running_or_notify_cancel():
                future.set_exception(_closed())
        self._pool.shutdown(wait=wait)

    def _start(self) -> None:
        while self._free and (next_work := self._shares.take()) is not None:
            self._free -= 1
            self._pool.submit(self._run, *next_work)

    def _run(self, client: str, work: "tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]") -> None:
        future, function, arguments = work
        try:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(*arguments))
                except BaseException as error:
                    future.set_exception(error)
        finally:
            with self._lock:
                self._free += 1
                self._shares.done(client)
                self._start()


def _closed() -> Closed:
    return Closed("this runtime was closed; open the bundle again")

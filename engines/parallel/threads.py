"""Divide work among threads, as many as the operating system gives."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Lock, Thread
from typing import Generic, TypeVar

A = TypeVar("A")
T = TypeVar("T")


class SharedWork(Generic[T]):
    """Work that runs once, in the thread that claims it first."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._claimed = Lock()
        self._future: Future[T] = Future()

    def run(self) -> None:
        """Run the work unless another thread has begun it."""
        if not self._claimed.acquire(blocking=False):
            return
        try:
            self._future.set_result(self._function())
        except BaseException as error:  # raised again by ``result``
            self._future.set_exception(error)

    def result(self) -> T:
        """Run the work, or wait for the thread that has begun it."""
        self.run()
        return self.wait()

    def wait(self) -> T:
        """Wait for the thread that runs the work."""
        return self._future.result()


def begun(function: Callable[[], T]) -> SharedWork[T]:
    """Return work that a thread has begun. If the operating system refuses a thread, ``result`` runs it."""
    work = SharedWork(function)
    with suppress(RuntimeError):  # no thread could start, or the interpreter exits
        Thread(target=work.run).start()
    return work


def map_in_threads(function: Callable[[A], T], items: Iterable[A], threads: int) -> list[T]:
    """Return ``function`` of each of ``items``, computed by at most ``threads`` threads. See map_ahead for errors."""
    every = list(items)
    return list(map_ahead(function, every, threads, ahead=len(every)))


def map_ahead(function: Callable[[A], T], items: Iterable[A], threads: int, *, ahead: int | None = None) -> Iterator[T]:
    """Yield ``function`` of each of ``items`` in their order, computed by at most ``threads`` threads.

    At most ``ahead`` results wait for the caller; None: two a thread. If the operating system refuses a thread, the
    caller computes, too. Raises the first error, in the order of ``items``, when all work that had begun has ended.
    """
    most, refused = 2 * threads if ahead is None else ahead, False
    waiting: deque[SharedWork[T]] = deque()

    def first() -> T:
        work = waiting.popleft()
        return work.result() if refused else work.wait()

    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(SharedWork(partial(function, item)))
                try:
                    pool.submit(waiting[-1].run)
                except RuntimeError:  # no thread could start, or the interpreter exits
                    refused = True
                if len(waiting) > most:
                    yield first()
            while waiting:
                yield first()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise

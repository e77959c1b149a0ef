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
    """Return ``function`` of each of ``items``, computed by at most ``threads`` threads.

    If the operating system refuses a thread, the calling thread helps. Raises the first error, in the order of
    ``items``, when all work that had begun has ended.
    """
    parts = [SharedWork(partial(function, item)) for item in items]
    refused = False
    with ThreadPoolExecutor(threads) as pool:
        for part in parts:
            try:
                pool.submit(part.run)
            except RuntimeError:  # no thread could start, or the interpreter exits
                refused = True
                break
        try:
            return [part.result() if refused else part.wait() for part in parts]
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def map_ahead(function: Callable[[A], T], items: Iterable[A], threads: int) -> Iterator[T]:
    """Yield ``function`` of each of ``items`` in their order, computed ahead by at most ``threads`` threads.

    At most two results a thread wait for the caller. If the operating system refuses a thread, the caller computes.
    """
    waiting: deque[SharedWork[T]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            waiting.append(SharedWork(partial(function, item)))
            with suppress(RuntimeError):  # no thread could start, or the interpreter exits
                pool.submit(waiting[-1].run)
            if len(waiting) > 2 * threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

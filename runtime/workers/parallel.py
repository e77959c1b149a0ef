"""Threads that take over parts of the work of one round. Grammar engines release the GIL while they compute."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tandemrt.engines.parallel.threads import SharedWork

K = TypeVar("K")
T = TypeVar("T")

MAX_THREADS = 4  # including the thread of the caller


class ParallelWork:
    """A pool of threads, which start on demand and live until ``close``. For one caller."""

    def __init__(self) -> None:
        self._pool = _new_pool()

    def start(self, work: Mapping[K, Callable[[], T]]) -> dict[K, Callable[[], T]]:
        """Start ``work``; return, by key, a function that returns the result or raises its error. Call all, in order.

        The threads run parts of the work at once. A returned function runs its part itself if no thread has begun it,
        so the work is complete without any thread. All parts have ended after the last call.
        """
        parts = {key: SharedWork(function) for key, function in work.items()}
        for part in list(parts.values())[1:]:
            try:
                self._pool.submit(part.run)
            except RuntimeError:  # no thread could start, or the interpreter exits: the caller runs the rest
                self.close()  # the pool would keep the part in its queue
                self._pool = _new_pool()
                break
        return {key: part.result for key, part in parts.items()}

    def close(self) -> None:
        """End the threads without waiting for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _new_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MAX_THREADS - 1, "tandemrt-parallel")

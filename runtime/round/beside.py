"""Work of one round in several threads: grammars release the interpreter while they work."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")

MOST_THREADS = 4  # the caller's included


def beside(work: Mapping[K, Callable[[], T]]) -> dict[K, Callable[[], T]]:
    """Begin all ``work``; return what gives each result, or raises what it raised, and is to be asked in this order.

    The first part of it is done by whoever asks, the others in threads that have ended when all was asked for.
    """
    threads = min(MOST_THREADS, len(work))
    results: dict[K, Callable[[], T]] = dict(work)
    for part in range(1, threads):
        futures = {key: Future[T]() for key in list(work)[part::threads]}
        try:
            Thread(target=_do, args=([(futures[key], work[key]) for key in futures],), name="tandemrt-beside").start()
        except RuntimeError:  # the system gives no more threads: whoever asks does it
            break
        results |= {key: future.result for key, future in futures.items()}
    return results


def _do(work: list[tuple[Future[T], Callable[[], T]]]) -> None:
    for future, function in work:
        try:
            future.set_result(function())
        except BaseException as error:  # it belongs to whoever asks
            future.set_exception(error)

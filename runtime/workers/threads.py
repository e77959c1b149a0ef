"""Start threads, and report clearly when the operating system refuses one."""

from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from tandemrt.engines.validation.errors import InternalError

T = TypeVar("T")


def start(thread: Thread, purpose: str) -> None:
    """Start ``thread``. Raises InternalError with ``purpose`` if the operating system refuses it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise refused(purpose, error) from error


def refused(purpose: str, error: RuntimeError) -> InternalError:
    """The error for a thread that could not start."""
    return InternalError(f"{purpose}: a thread could not start: {error}; raise the limit (ulimit -u) and send it again")


async def run_in_thread(purpose: str, function: Callable[..., T], *arguments: object) -> T:
    """Return ``function(*arguments)`` from a thread of the event loop's pool. Raises InternalError if none can start.

    asyncio keeps refused work in its queue and runs it with the next thread, so the work checks whether it was refused.
    """
    import asyncio  # slow to import, and only streams need it

    begun = abandoned = False

    def guarded() -> T:
        nonlocal begun
        if abandoned:  # the caller has its error
            raise InternalError(f"{purpose}: was abandoned")
        begun = True
        return function(*arguments)

    try:
        return await asyncio.to_thread(guarded)
    except RuntimeError as error:
        if begun:
            raise
        abandoned = True
        raise refused(purpose, error) from error

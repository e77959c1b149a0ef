"""Shut down cleanly: join threads that run native code before the interpreter exits.

The process aborts if the interpreter exits while a thread is inside native code. Threads that run engines or the
grammar compiler register here. At exit each of them is stopped and joined; interrupts are ignored meanwhile.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

SHUTDOWN_S = 30.0  # for all threads together, so that a stuck thread does not block the exit forever

_threads: dict[threading.Thread, Callable[[], None]] = {}
_lock = threading.Lock()


def join_at_exit(thread: threading.Thread, stop: Callable[[], None]) -> None:
    """Register ``thread``: at exit, call ``stop`` and join it. Ended threads are removed."""
    with _lock:
        running = threading.enumerate()
        for ended in [each for each in _threads if each.ident is not None and each not in running]:
            del _threads[ended]
        _threads[thread] = stop


def join(thread: threading.Thread, deadline: float | None = None) -> None:
    """Wait until ``thread`` has ended, at most until ``deadline`` (seconds of ``time.perf_counter``).

    In CPython 3.11 and 3.12, ``Thread.join`` treats a running thread as ended after it was interrupted once.
    """
    while thread in threading.enumerate() and (deadline is None or time.perf_counter() < deadline):
        if thread.is_alive():
            thread.join(None if deadline is None else max(0.0, deadline - time.perf_counter()))
        else:
            time.sleep(0.005)


def run_first() -> None:
    """Stop and join the threads before everything that was registered to run at exit until now."""
    atexit.unregister(_at_exit)
    atexit.register(_at_exit)


def _at_exit() -> None:
    """Stop and join all threads. An interrupt must not get through, or the remaining threads would not be joined."""
    deadline = time.perf_counter() + SHUTDOWN_S
    while True:
        try:
            with suppress(ValueError):  # not in the main thread; only that one receives interrupts
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            _stop_and_wait(deadline)
            return
        except KeyboardInterrupt:  # arrived before interrupts were ignored; stopping twice is safe
            continue


def _stop_and_wait(deadline: float) -> None:
    registered = list(_threads.items())
    for _, stop in registered:
        stop()
    for thread, _ in registered:
        join(thread, deadline)


def _forked() -> None:
    """A forked child has none of the threads, and the lock may be held by one of them."""
    global _lock
    _lock = threading.Lock()
    _threads.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_forked)

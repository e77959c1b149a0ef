"""How the interpreter leaves: it waits for threads that it would else end inside native code, which aborts.

A thread that runs an engine or the grammar compiler is entered here. When the interpreter ends, however it came to
that, each is asked to stop and waited for; who interrupts again changes nothing.
"""

import atexit
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress

LEAVING_S = 30.0  # for all together: a thread that is stuck must not keep the process for ever

_threads: dict[threading.Thread, Callable[[], None]] = {}
_changing = threading.Lock()


def wait_for(thread: threading.Thread, stop: Callable[[], None]) -> None:
    """Call ``stop`` and wait for ``thread`` before the interpreter ends. Forgotten when the thread has ended."""
    with _changing:
        running = threading.enumerate()
        for ended in [each for each in _threads if each.ident is not None and each not in running]:
            del _threads[ended]
        _threads[thread] = stop


def join(thread: threading.Thread, end: float | None = None) -> None:
    """Wait until ``thread`` has ended, at most until ``end`` (seconds of ``time.perf_counter``).

    ``Thread.join`` that was interrupted once takes a thread for ended that runs (CPython 3.11 and 3.12).
    """
    while thread in threading.enumerate() and (end is None or time.perf_counter() < end):
        if thread.is_alive():
            thread.join(None if end is None else max(0.0, end - time.perf_counter()))
        else:
            time.sleep(0.005)


def _leave() -> None:
    """Wait for all, whoever interrupts: an interrupt that got through would leave the others unwaited for."""
    end = time.perf_counter() + LEAVING_S
    while True:
        try:
            with suppress(ValueError):  # of another thread than the main one, which no interrupt reaches
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            _stop_and_wait(end)
            return
        except KeyboardInterrupt:  # one that came before they were ignored; to stop is safe twice
            continue


def _stop_and_wait(end: float) -> None:
    leaving = list(_threads.items())
    for _, stop in leaving:
        stop()
    for thread, _ in leaving:
        join(thread, end)


def _forked() -> None:
    """A child has none of the threads, and nobody who could open the lock."""
    global _changing
    _changing = threading.Lock()
    _threads.clear()


atexit.register(_leave)
os.register_at_fork(after_in_child=_forked)

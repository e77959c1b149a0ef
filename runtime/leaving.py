"""How the interpreter leaves: it waits for threads that it would else end inside native code, which aborts.

A thread that runs an engine or the grammar compiler is entered here. When the interpreter ends, however it came to
that, each is asked to stop and waited for; who interrupts again only interrupts the waiting.
"""

import atexit
import os
import threading
import time
from collections.abc import Callable

LEAVING_S = 30.0  # for all together: a thread that is stuck must not keep the process for ever

_threads: dict[threading.Thread, Callable[[], None]] = {}
_changing = threading.Lock()


def wait_for(thread: threading.Thread, stop: Callable[[], None]) -> None:
    """Call ``stop`` and wait for ``thread`` before the interpreter ends. Forgotten when the thread has ended."""
    with _changing:
        for ended in [each for each in _threads if each.ident is not None and not each.is_alive()]:
            del _threads[ended]
        _threads[thread] = stop


def _leave() -> None:
    end = time.perf_counter() + LEAVING_S
    leaving = list(_threads.items())
    for _, stop in leaving:
        stop()
    for thread, _ in leaving:
        while thread.is_alive() and (left := end - time.perf_counter()) > 0:
            try:
                thread.join(left)
            except KeyboardInterrupt:
                continue


def _forked() -> None:
    """A child has none of the threads, and nobody who could open the lock."""
    global _changing
    _changing = threading.Lock()
    _threads.clear()


atexit.register(_leave)
os.register_at_fork(after_in_child=_forked)

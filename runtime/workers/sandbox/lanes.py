"""Worker processes in two lanes, so that quick tasks do not wait for slow ones."""

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any
from weakref import ref

from tandemrt.runtime.workers.clients import Client
from tandemrt.runtime.workers.sandbox.pool import ProcessPool, TooSlow

QUICK_S = 0.5  # time limit of the quick lane


class ProcessLanes:
    """Runs each task in a quick ProcessPool, and again in a slow one if it takes more than ``QUICK_S`` there.

    A few clients with slow tasks delay the quick tasks of others by that time only. ``options``: of each ProcessPool.
    """

    def __init__(self, **options: Any) -> None:
        self._quick = ProcessPool(**options)
        self._slow = ProcessPool(**options)

    def submit(
        self,
        client: Client,
        what: str,
        limit_s: float,
        function: Callable[..., Any],
        *arguments: Any,
        deadline: float | None = None,
        wait_s: float | None = None,
    ) -> "Future[Any]":
        """Return a future as ``ProcessPool.submit`` does; it can be cancelled until it is done.

        ``limit_s`` limits the time in the slow lane, and ``wait_s`` the time from now until the task starts there.
        """
        begin_by = None if wait_s is None else time.monotonic() + wait_s

        def submit_slow() -> "Future[Any]":
            rest_s = None if begin_by is None else begin_by - time.monotonic()
            return self._slow.submit(client, what, limit_s, function, *arguments, deadline=deadline, wait_s=rest_s)

        quick_s = min(QUICK_S, limit_s)
        quick = self._quick.submit(client, what, quick_s, function, *arguments, deadline=deadline, wait_s=wait_s)
        result: Future[Any] = Future()
        _connect(result, quick, submit_slow if quick_s < limit_s else None)
        return result

    def close(self) -> None:
        """Close both pools, see ``ProcessPool.close``."""
        self._quick.close()
        self._slow.close()


def _connect(result: "Future[Any]", task: "Future[Any]", again: "Callable[[], Future[Any]] | None") -> None:
    """Let ``result`` end as ``task`` does, and cancel ``task`` with it. ``again``: the next attempt, if it is slow."""
    task.add_done_callback(partial(_pass_on, result, again))
    running = ref(task)  # the future of a caller keeps its callbacks, and these would keep the arguments of the task

    def cancel(result: "Future[Any]") -> None:
        if result.cancelled() and (task := running()) is not None:
            task.cancel()

    result.add_done_callback(cancel)


def _pass_on(result: "Future[Any]", again: "Callable[[], Future[Any]] | None", task: "Future[Any]") -> None:
    error = CancelledError() if task.cancelled() else task.exception()
    if isinstance(error, TooSlow) and again is not None and not result.cancelled():
        try:
            slow = again()
        except BaseException as refused:
            error = refused
        else:
            _connect(result, slow, None)
            return
    if not result.set_running_or_notify_cancel():
        return
    if error is None:
        result.set_result(task.result())
    else:
        result.set_exception(error.with_traceback(None))

"""Notices that clients cancelled or went away, and cancels their requests."""

import logging
import threading
import time

from tandemrt.runtime.llm import LLM
from tandemrt.runtime.triton.responses import Reply

log = logging.getLogger(__name__)

_INTERVAL_S = 0.005  # about a round
_STILL = 8  # asked about at a time, of those that wait


class Watch:
    """A thread that asks the server about open requests, a few milliseconds apart, while there are any.

    Asking is a call to another process. So those that moved since they were asked about, which hold a slot, come every
    time, and of those that wait a few in turn: a slot is not held for a client that is gone, however many wait.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._open: list[Reply] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="tandemrt-watch", daemon=True)
        self._thread.start()

    def add(self, reply: Reply) -> None:
        with self._changed:
            self._open.append(reply)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._open = [reply for reply in self._open if not reply.done]
                while not self._open and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                moved = [reply for reply in self._open if reply.moved]
                still = [reply for reply in self._open if not reply.moved]
                asked, rest = still[:_STILL], still[_STILL:]
                self._open = moved + rest + asked
            start = time.perf_counter()
            for reply in moved + asked:
                try:
                    if reply.abandoned():
                        self._llm.cancel(reply.request)
                except BaseException:  # the clients of others need this thread
                    log.exception("a client could not be asked about; its request goes on")
            time.sleep(max(_INTERVAL_S, time.perf_counter() - start))  # half of the time at most

"""Notices that clients cancelled or went away, and cancels their requests."""

import logging
import threading
import time

from tandemrt.runtime.llm import LLM
from tandemrt.runtime.triton.responses import Reply

log = logging.getLogger(__name__)

_INTERVAL_S = 0.005  # about a round


class Watch:
    """A thread that asks the server about every open request, a few milliseconds apart, while there are any."""

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
                replies = list(self._open)
            start = time.perf_counter()
            for reply in replies:
                try:
                    if reply.abandoned():
                        self._llm.cancel(reply.request)
                except BaseException:  # the clients of others need this thread
                    log.exception("a client could not be asked about; its request goes on")
            # Asking is a call to another process: never more than a tenth of the time goes into it.
            time.sleep(max(_INTERVAL_S, 9 * (time.perf_counter() - start)))

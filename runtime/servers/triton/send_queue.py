"""Send responses on a thread of their own, so that the engine loop never waits for the server."""

import logging
import threading
from queue import SimpleQueue
from typing import Protocol

from tandemrt.runtime.workers.threads import start

log = logging.getLogger(__name__)


class Sendable(Protocol):
    def send(self) -> None:
        """Send everything that is buffered."""

    def fail(self, error: BaseException) -> None:
        """End a request whose ``send`` raised ``error``."""


class SendQueue:
    """Queue of streams that have something to send, and the thread that sends it.

    The queue holds streams, not responses. A stream is in the queue at most once, and sends all it has buffered as one
    response. The queue is therefore never longer than the number of open requests, however slow the server is.
    """

    def __init__(self) -> None:
        self._streams: SimpleQueue[Sendable | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="tandemrt-responses", daemon=True)
        start(self._thread, "responses")

    def put(self, stream: Sendable) -> None:
        self._streams.put(stream)

    def close(self) -> None:
        """Send what is queued, then stop."""
        self._streams.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (stream := self._streams.get()) is not None:
            try:
                stream.send()
            except BaseException as error:  # other requests need this thread
                log.exception("a response could not be sent; its request is cancelled")
                stream.fail(error)

"""Request streams for asyncio."""

import asyncio
import threading
from contextlib import suppress

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import RequestOutput
from tandemrt.runtime.servers.openai.field_names import client_names, with_client_names
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tandemrt.runtime.servers.request_stream import OutputDelta, RequestStream
from tandemrt.runtime.workers.fair import FairExecutor


class EventNotifier:
    """Sets asyncio events from other threads, all events of a round with one call into the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: list[asyncio.Event] = []
        self._lock = threading.Lock()

    def notify(self, event: asyncio.Event) -> None:
        """Set ``event`` soon. Thread-safe. Does nothing after the event loop has closed."""
        with self._lock:
            self._events.append(event)
            if len(self._events) > 1:
                return
        with suppress(RuntimeError):  # the event loop has closed: every request has its answer
            self._loop.call_soon_threadsafe(self._set_events)

    def _set_events(self) -> None:
        with self._lock:
            events, self._events = self._events, []
        for event in events:
            event.set()


class AsyncRequestStream(RequestStream):
    """Outputs of one request for a coroutine.

    Args:
        threads: run ``LLM.submit``, because reading a prompt takes time.
    """

    CANCELLED = "the request was cancelled: the server is closing"
    TIMED_OUT = "timeout_s: the time ran out before the first token; send it again later or allow more"

    def __init__(self, llm: LLM, parsed: CompletionRequest, notifier: EventNotifier, threads: FairExecutor) -> None:
        super().__init__(llm, parsed)
        self._field_names = parsed.field_names
        self._notifier = notifier
        self._threads = threads
        self._arrived = asyncio.Event()

    async def start(self) -> None:
        """Queue the request outside the event loop. Raises BadRequest or QueueFull."""
        with client_names(self._field_names):
            await asyncio.wrap_future(self._threads.submit(self._parsed.client, self.submit))

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.request.prompt)

    async def next(self) -> list[OutputDelta]:
        """Wait for new deltas, one per output. Raises the error of an output that failed."""
        deltas: list[OutputDelta] = []
        while not deltas:  # an earlier call may have taken what the event announced
            await self._arrived.wait()
            self._arrived.clear()
            deltas = self.take()
        for delta in deltas:
            error = None if delta.output is None else self.error_of(delta.output)
            if error is not None:
                raise with_client_names(error, self._field_names) if isinstance(error, BadRequest) else error
        return deltas

    async def outputs(self) -> list[RequestOutput]:
        """Wait for all outputs of the request. Raises the error of an output that failed."""
        finished: dict[int, RequestOutput] = {}
        while len(finished) < self._parsed.params.n:
            finished |= {delta.index: delta.output for delta in await self.next() if delta.output is not None}
        return [finished[index] for index in range(self._parsed.params.n)]

    def _notify(self) -> None:
        self._notifier.notify(self._arrived)

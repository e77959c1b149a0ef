"""Request streams for asyncio."""

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import Request, RequestOutput
from tandemrt.runtime.requests.request_size import RequestSize
from tandemrt.runtime.servers.openai.answer_size import AnswerSize
from tandemrt.runtime.servers.openai.field_names import client_names, with_client_names
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tandemrt.runtime.servers.openai.token_sources import TokenSources
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
    """Outputs of one prompt. ``arrived`` is set when there are new ones."""

    CANCELLED = "the request was cancelled: the server is closing"
    TIMED_OUT = "timeout_s: the time ran out before the first token; send it again later or allow more"

    def __init__(self, llm: LLM, parsed: CompletionRequest, notifier: EventNotifier, arrived: asyncio.Event) -> None:
        super().__init__(llm, parsed)
        self._notifier = notifier
        self._arrived = arrived

    def _notify(self) -> None:
        self._notifier.notify(self._arrived)


class AsyncAnswer:
    """Outputs of one HTTP request for a coroutine. Those of each prompt follow those of the prompt before it.

    Args:
        threads: run ``LLM.submit``, because reading a prompt takes time.
        max_answer: bytes of the answer besides its texts (AnswerSize).
    """

    def __init__(
        self,
        llm: LLM,
        parsed: CompletionRequest,
        notifier: EventNotifier,
        threads: FairExecutor,
        max_answer: int,
    ) -> None:
        self._parsed = parsed
        self._size = AnswerSize(parsed, max_answer)
        self._threads = threads
        self._arrived = asyncio.Event()
        self._tokenizer = llm.tokenizer.backend
        self._sources: dict[Request, TokenSources] = {}
        self._streams = [AsyncRequestStream(llm, each, notifier, self._arrived) for each in parsed.by_prompt()]

    async def start(self) -> None:
        """Queue the prompts outside the event loop. Raises BadRequest or QueueFull."""
        size = RequestSize()
        for stream in self._streams:
            with client_names(self._parsed.field_names):
                await asyncio.wrap_future(self._threads.submit(self._parsed.client, stream.submit))
                request = stream.request
                size.add(request.params, len(request.prompt), request.max_tokens)
                self._size.add(request)
        self._parsed = self._parsed.without_prompts()

    def cancel(self) -> None:
        """End the request within a round, also while ``start`` runs. Does nothing after its end."""
        for stream in self._streams:
            stream.cancel()

    @property
    def requests(self) -> list[Request]:
        """The queued request of each prompt. Only after ``start``."""
        return [stream.request for stream in self._streams]

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(request.prompt) for request in self.requests)

    async def next(self) -> list[OutputDelta]:
        """Wait for new deltas, one per output. Raises the error of an output that failed."""
        deltas: list[OutputDelta] = []
        while not deltas:  # an earlier call may have taken what the event announced
            await self._arrived.wait()
            self._arrived.clear()
            deltas = [delta for at in range(len(self._streams)) for delta in self._take(at)]
        return deltas

    async def outputs(self) -> list[RequestOutput]:
        """Wait for all outputs. Raises the error of an output that failed, BadRequest if they become too large."""
        count = len(self._streams) * self._parsed.params.n
        finished: dict[int, RequestOutput] = {}
        while len(finished) < count:
            for delta in await self.next():
                if delta.output is not None:
                    self._size.count(delta.output)
                    finished[delta.index] = delta.output
        return [finished[index] for index in range(count)]

    def _take(self, at: int) -> Iterator[OutputDelta]:
        stream, first = self._streams[at], at * self._parsed.params.n
        for delta in stream.take():
            error = None if delta.output is None else stream.error_of(delta.output)
            if error is not None:
                names = self._parsed.field_names
                raise with_client_names(error, names) if isinstance(error, BadRequest) else error
            if self._parsed.stream_options.include_token_sources:
                delta = replace(delta, sources=self._sources_of(stream.request, delta))
            yield replace(delta, index=first + delta.index) if first else delta

    def _sources_of(self, request: Request, delta: OutputDelta) -> Sequence[Mapping[str, Any]]:
        """Return where the tokens of ``delta`` came from. ``request``: the first of its prompt."""
        output = (request, *request.others)[delta.index]
        if output not in self._sources:
            self._sources[output] = TokenSources(output, self._tokenizer)
        return self._sources[output].take(delta)

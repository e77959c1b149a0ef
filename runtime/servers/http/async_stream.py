"""Request streams for asyncio."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from weakref import WeakMethod

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

log = logging.getLogger(__name__)


class EventNotifier:
    """Calls functions in the event loop for other threads, all those of a round with one call into the event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrivals: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def notify(self, arrive: Callable[[], None]) -> None:
        """Call ``arrive``, which does not raise, soon. Thread-safe. Does nothing after the event loop has closed."""
        with self._lock:
            self._arrivals.append(arrive)
            if len(self._arrivals) > 1:
                return
        with suppress(RuntimeError):  # the event loop has closed: every request has its answer
            self._loop.call_soon_threadsafe(self._call)

    def _call(self) -> None:
        with self._lock:
            arrivals, self._arrivals = self._arrivals, []
        for arrive in arrivals:
            arrive()


class AsyncRequestStream(RequestStream):
    """Outputs of one prompt. ``arrive`` is called in the event loop when there are new ones."""

    CANCELLED = "the request was cancelled: the server is closing"
    TIMED_OUT = "timeout_s: the time ran out before the first token; send it again later or allow more"

    def __init__(
        self, llm: LLM, parsed: CompletionRequest, notifier: EventNotifier, arrive: Callable[[], None]
    ) -> None:
        super().__init__(llm, parsed)
        self._notifier = notifier
        self._arrive = arrive

    def _notify(self) -> None:
        self._notifier.notify(self._arrive)


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
        self.prompt_tokens = 0  # of all prompts, after ``start``
        self._arrived = asyncio.Event()
        self._write: Callable[[OutputDelta], bool] | None = None  # while ``next`` waits
        self._unwritten: list[OutputDelta] = []  # that ``next`` returns first
        self._tokenizer = llm.tokenizer.backend
        self._sources: dict[Request, TokenSources] = {}
        arrive = WeakMethod(self._arrive)  # so that a refused request is freed at once, not by a garbage collection

        def wake() -> None:
            if (call := arrive()) is not None:
                call()

        self._streams = [AsyncRequestStream(llm, each, notifier, wake) for each in parsed.by_prompt()]

    async def start(self) -> None:
        """Queue the prompts outside the event loop. Raises BadRequest or QueueFull."""
        size = RequestSize()
        for stream in self._streams:
            with client_names(self._parsed.field_names):
                await asyncio.wrap_future(self._threads.submit(self._parsed.client, stream.submit))
                request = stream.request
                size.add(request.params, len(request.prompt), request.max_tokens)
                self._size.add(request)
        self.prompt_tokens = sum(len(request.prompt) for request in self.requests)
        self._parsed = self._parsed.without_prompts()

    def cancel(self) -> None:
        """End the request within a round, also while ``start`` runs. Does nothing after its end."""
        for stream in self._streams:
            stream.cancel()

    @property
    def requests(self) -> list[Request]:
        """The queued request of each prompt. Only after ``start``."""
        return [stream.request for stream in self._streams]

    async def next(self, write: Callable[[OutputDelta], bool] | None = None) -> list[OutputDelta]:
        """Wait for new deltas. Raises the error of an output that failed.

        ``write`` gets deltas of a single prompt in the meantime, and returns whether it could write them at once: that
        takes a quarter of the time of waking a task.
        """
        deltas: list[OutputDelta] = []
        while not deltas:  # an earlier call may have taken what the event announced
            self._write = write if len(self._streams) == 1 else None
            try:
                await self._arrived.wait()
            finally:
                self._write = None
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

    def _arrive(self) -> None:
        """Write the newest delta, or wake ``next``."""
        write, self._write = self._write, None
        if write is not None:
            self._unwritten = self._streams[0].take()
            try:
                if len(self._unwritten) == 1 and write(self._unwritten[0]):
                    self._unwritten, self._write = [], write
                    return
            except Exception:
                log.exception("a part of a stream could not be written at once; it is sent later")
        self._arrived.set()

    def _take(self, at: int) -> Iterator[OutputDelta]:
        stream, first = self._streams[at], at * self._parsed.params.n
        unwritten, self._unwritten = self._unwritten, []
        for delta in (*unwritten, *stream.take()):
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

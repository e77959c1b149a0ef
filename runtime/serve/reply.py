"""From the loop's thread to asyncio: what a request has to say, joined up to the time that somebody takes it."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

from tandemrt.engines.errors import InternalError, TandemError, named
from tandemrt.runtime.fair import FairExecutor
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.outputs import RequestOutput, StreamOutput
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.serve.ask import Ask
from tandemrt.runtime.serve.errors import Cancelled, TimedOut


@dataclass(frozen=True)
class Piece:
    """Text of one output that became certain, and its tokens; ``output`` with the last one.

    ``logprobs``: of the tokens, if they were asked for.
    """

    index: int
    text: str
    reasoning: str
    token_ids: Sequence[int]
    logprobs: Sequence[TokenLogprobs]
    output: RequestOutput | None

    @classmethod
    def joined(cls, items: Sequence[StreamOutput]) -> "Piece":
        """What ``items`` of one output say together."""
        return cls(
            index=items[0].index,
            text="".join(item.text for item in items),
            reasoning="".join(item.reasoning for item in items),
            token_ids=[token for item in items for token in item.token_ids],
            logprobs=[each for item in items for each in item.logprobs or ()],
            output=items[-1].output,
        )


class Mail:
    """Wakes those who wait in an event loop, all of a round with one call from the rounds' thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._told: list[asyncio.Event] = []
        self._telling = threading.Lock()

    def tell(self, event: asyncio.Event) -> None:
        """Set ``event``, soon. From any thread. Raises RuntimeError once the event loop is closed."""
        with self._telling:
            self._told.append(event)
            if len(self._told) > 1:
                return
        self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._telling:
            told, self._told = self._told, []
        for event in told:
            event.set()


class Reply:
    """One request's way back. A reader that is slow holds nobody up: it finds all that was said in between, once."""

    def __init__(self, llm: LLM, ask: Ask, mail: Mail, readers: FairExecutor, *, client: str) -> None:
        self._llm = llm
        self._ask = ask
        self._mail = mail
        self._readers = readers
        self._client = client
        self._request: Request | None = None
        self._left = False
        self._said: list[StreamOutput] = []
        self._saying = threading.Lock()
        self._something = asyncio.Event()

    @property
    def request(self) -> Request:
        assert self._request is not None, "asked for before it was submitted"
        return self._request

    async def start(self) -> None:
        """Queue the request, off the event loop: a prompt takes time to read. Raises BadRequest or QueueFull."""
        await asyncio.wrap_future(self._readers.submit(self._client, self._submit))

    async def next(self) -> list[Piece]:
        """Wait for what is new, a piece for each output that has any. Raises what kept one from its end."""
        said: list[StreamOutput] = []
        while not said:  # woken for what was taken already
            await self._something.wait()
            self._something.clear()
            with self._saying:
                said, self._said = self._said, []
        for item in said:
            if item.output is not None:
                self._require_text(item.output)
        indices = dict.fromkeys(item.index for item in said)
        return [Piece.joined([item for item in said if item.index == index]) for index in indices]

    async def whole(self) -> list[RequestOutput]:
        """Wait for the end of all outputs. Raises what kept one from it."""
        ended: dict[int, RequestOutput] = {}
        while len(ended) < self._ask.params.n:
            ended |= {piece.index: piece.output for piece in await self.next() if piece.output is not None}
        return [ended[index] for index in range(self._ask.params.n)]

    def cancel(self) -> None:
        """End the request within a round, also one that is being submitted. Nothing happens if it has finished."""
        self._left = True
        if self._request is not None:
            self._llm.cancel(self._request)

    def _submit(self) -> None:
        self._request = self._llm.submit(self._ask.prompt, self._ask.params, self._listen, client=self._client)
        if self._left:
            self.cancel()

    def _listen(self, item: StreamOutput) -> None:
        if not self._ask.stream and item.output is None:
            return
        with self._saying:
            self._said.append(item)
            if len(self._said) > 1:
                return
        self._mail.tell(self._something)

    def _require_text(self, output: RequestOutput) -> None:
        failure = (self.request, *self.request.others)[output.index].failure
        if failure is not None:
            raise failure if isinstance(failure, TandemError) else InternalError(named(failure))
        if output.finish_reason == "cancelled":
            raise Cancelled("the request was cancelled: the server is closing")
        if output.finish_reason == "timeout" and not output.token_ids:
            raise TimedOut("timeout_s: the time ran out before the first token; send it again later or allow more")

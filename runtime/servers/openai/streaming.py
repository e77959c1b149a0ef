"""Stream a response as server-sent events."""

from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tandemrt.engines.validation.errors import TandemError
from tandemrt.runtime.servers.openai.async_stream import AsyncAnswer
from tandemrt.runtime.servers.openai.protocols import Endpoint, Formatter
from tandemrt.runtime.servers.request_stream import OutputDelta


class EventStream(StreamingResponse):
    """Sends the chunks of one request. The request is cancelled when the response ends, for any reason.

    Args:
        first: deltas that were already taken from ``stream``.
        held: closed when the response ends.
    """

    def __init__(
        self,
        stream: AsyncAnswer,
        first: Sequence[OutputDelta],
        formatter: Formatter,
        endpoint: Endpoint,
        held: ExitStack,
    ) -> None:
        self._stream = stream
        self._held = held
        events = _events(stream, first, formatter, endpoint)
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()
            self._held.close()


async def _events(
    stream: AsyncAnswer, first: Sequence[OutputDelta], formatter: Formatter, endpoint: Endpoint
) -> AsyncIterator[str]:
    prompt_tokens = stream.prompt_tokens
    try:
        yield endpoint.events(formatter.chunks(first, prompt_tokens))
        while not formatter.finished:
            yield endpoint.events(formatter.chunks(await stream.next(), prompt_tokens))
    except TandemError as error:
        yield endpoint.failure(error)
    else:
        yield endpoint.end

"""Stream a response as server-sent events."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tandemrt.engines.validation.errors import TandemError
from tandemrt.runtime.servers.openai.async_stream import AsyncRequestStream
from tandemrt.runtime.servers.openai.cancelled_answers import STREAM_END
from tandemrt.runtime.servers.openai.errors import error_body
from tandemrt.runtime.servers.openai.responses import CompletionFormatter
from tandemrt.runtime.servers.request_stream import OutputDelta


class EventStream(StreamingResponse):
    """Sends the chunks of one request. The request is cancelled when the response ends, for any reason.

    Args:
        first: deltas that were already taken from ``stream``.
    """

    def __init__(
        self, stream: AsyncRequestStream, first: Sequence[OutputDelta], formatter: CompletionFormatter
    ) -> None:
        self._stream = stream
        events = _events(stream, first, formatter)
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()


async def _events(
    stream: AsyncRequestStream, first: Sequence[OutputDelta], formatter: CompletionFormatter
) -> AsyncIterator[str]:
    try:
        yield _encode(formatter.chunks(first, len(stream.request.prompt)))
        while not formatter.finished:
            yield _encode(formatter.chunks(await stream.next(), len(stream.request.prompt)))
    except TandemError as error:
        yield _encode([error_body(error)])
    yield STREAM_END


def _encode(chunks: list[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n" for chunk in chunks)

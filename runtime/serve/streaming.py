"""An answer as server-sent events."""

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from tandemrt.engines.errors import TandemError
from tandemrt.runtime.serve import errors
from tandemrt.runtime.serve.reply import Piece, Reply
from tandemrt.runtime.serve.shapes import Shape


class EventStream(StreamingResponse):
    """The chunks of one request as they come. However it ends, the request has ended too."""

    def __init__(self, reply: Reply, first: Sequence[Piece], shape: Shape) -> None:
        self._reply = reply
        events = _events(reply, first, shape)
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.cancel()


async def _events(reply: Reply, first: Sequence[Piece], shape: Shape) -> AsyncIterator[str]:
    try:
        yield _joined(shape.chunks(first, len(reply.request.prompt)))
        while not shape.ended:
            yield _joined(shape.chunks(await reply.next(), len(reply.request.prompt)))
    except TandemError as error:
        yield _joined([errors.body(error)])
    yield "data: [DONE]\n\n"


def _joined(chunks: list[dict[str, Any]]) -> str:
    return "".join(f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n" for chunk in chunks)

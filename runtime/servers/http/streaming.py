"""Send answers in parts, each of which waits until the client has taken the one before it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Any

from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from tandemrt.engines.validation.errors import TandemError
from tandemrt.runtime.servers.http.async_stream import AsyncAnswer
from tandemrt.runtime.servers.http.body import BodyShare
from tandemrt.runtime.servers.http.connections import WRITE_PART
from tandemrt.runtime.servers.http.rendering import AnswerWriter
from tandemrt.runtime.servers.request_stream import OutputDelta

PART = 64 << 10  # bytes; a client has --write-timeout for each


class WholeAnswer(Response):
    """Sends the JSON text of an answer.

    Args:
        resources: closed when the client has taken all of it.
    """

    media_type = "application/json"

    def __init__(self, body: bytes, resources: ExitStack) -> None:
        super().__init__(body)
        self._resources = resources

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        with self._resources:
            await _deliver({"type": "http.response.start", "status": 200, "headers": self.raw_headers}, send)
            for part in _parts(bytes(self.body)):
                await _deliver({"type": "http.response.body", "body": part, "more_body": True}, send)
            await _deliver({"type": "http.response.body", "body": b""}, send)


class EventStream(StreamingResponse):
    """Sends the events of one request. The request is cancelled when the response ends, for any reason.

    Args:
        first: deltas that were already taken from ``stream``.
        share: counts events until the client has taken them.
        resources: closed when the response ends.
    """

    def __init__(
        self,
        stream: AsyncAnswer,
        first: Sequence[OutputDelta],
        writer: AnswerWriter,
        share: BodyShare,
        resources: ExitStack,
    ) -> None:
        self._stream = stream
        self._writer = writer
        self._resources = resources
        self._write_part: Callable[[bytes], bool] = lambda _: False
        parts = _event_parts(stream, first, writer, share, self._write)
        super().__init__(parts, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._write_part = scope.get("extensions", {}).get(WRITE_PART, self._write_part)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._stream.cancel()
            self._resources.close()

    def _write(self, delta: OutputDelta) -> bool:
        """Write the event of ``delta`` at once; return False if it cannot be."""
        event = self._writer.text_event(delta)
        return event is not None and self._write_part(event)


async def _event_parts(
    stream: AsyncAnswer,
    first: Sequence[OutputDelta],
    writer: AnswerWriter,
    share: BodyShare,
    write: Callable[[OutputDelta], bool],
) -> AsyncIterator[bytes]:
    deltas, before = first, share.size
    try:
        while True:
            events = await writer.events(deltas, stream.prompt_tokens)
            share.take_answer(len(events))
            for part in _parts(events):
                yield part
            share.keep(before)
            if writer.formatter.finished:
                break
            deltas = await stream.next(write)
    except TandemError as error:
        yield writer.endpoint.failure(error).encode()
    else:
        yield writer.endpoint.end.encode()


def _parts(data: bytes) -> Iterator[bytes]:
    return (data[at : at + PART] for at in range(0, len(data), PART))


async def _deliver(message: MutableMapping[str, Any], send: Send) -> None:
    """Send ``message``, also after the server has cancelled the task: it waits for clients to take last answers."""
    try:
        await send(message)
    except asyncio.CancelledError:  # before anything was sent
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
        await send(message)

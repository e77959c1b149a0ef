"""Answer requests that are cancelled because the server stops."""

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from tandemrt.runtime.servers.http.async_stream import AsyncRequestStream
from tandemrt.runtime.servers.openai.errors import error_response
from tandemrt.runtime.servers.openai.protocols import endpoint_of
from tandemrt.runtime.servers.request_stream import RequestCancelled


class CancelledAnswers:
    """Wraps an application: a request whose task is cancelled still gets an answer.

    A request without a response gets 503; an event stream gets an error event and its end.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = SentResponse(send)
        try:
            await self._app(scope, receive, sent.send)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if scope["type"] != "http" or task is None:
                raise
            task.uncancel()
            error, endpoint = RequestCancelled(AsyncRequestStream.CANCELLED), endpoint_of(scope["path"])
            if not sent.started:
                await error_response(error, {"Connection": "close"}, endpoint.error)(scope, receive, send)
            elif sent.events and not sent.complete:
                event = endpoint.failure(error).encode()
                await send({"type": "http.response.body", "body": event, "more_body": False})


class SentResponse:
    """The part of a response that was sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False
        self.events = False  # whether it is an event stream
        self.complete = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.events = kind.startswith(b"text/event-stream")
        await self._send(message)  # raises CancelledError before it has sent anything
        self.started = self.started or message["type"] == "http.response.start"
        if message["type"] == "http.response.body":
            self.complete = not message.get("more_body", False)

"""Take what remains of a request's body after its response.

A response such as 401 or 413 does not wait for the body. If the connection closed at once, a client that is still
sending would see a reset instead of the response. It closes when the body has come.
"""

import asyncio
from collections.abc import MutableMapping
from contextlib import suppress
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

MAX_DRAINED = 64 << 20  # bytes; the connection of a longer body closes before it has come


class DrainedBodies:
    """Wraps an application: the end of a response waits until the rest of the request's body has come and is dropped.

    The client has the whole response before that. ``timeout_s`` limits the wait. Then the connection closes, so that
    no client goes on after a body that nothing has read.
    """

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        if headers.get(b"content-length", b"0") == b"0" and b"transfer-encoding" not in headers:
            await self._app(scope, receive, send)
            return
        sends_unasked = b"expect" not in headers  # without waiting for the server's consent
        received = ended = False

        async def watched() -> MutableMapping[str, Any]:
            nonlocal received
            message = await receive()
            received = received or not message.get("more_body")
            return message

        async def send_on(message: MutableMapping[str, Any]) -> None:
            nonlocal ended
            if message["type"] == "http.response.start" and not received:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            last = message["type"] == "http.response.body" and not message.get("more_body")
            ended = last and not received and sends_unasked
            await send({**message, "more_body": True} if ended else message)

        await self._app(scope, watched, send_on)
        if ended:
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._timeout_s):
                        await _drain(receive)
            except asyncio.CancelledError:  # the server stops
                task = asyncio.current_task()
                if task is not None:
                    task.uncancel()
            await send({"type": "http.response.body", "body": b""})


async def _drain(receive: Receive) -> None:
    size, more = 0, True
    while more and size <= MAX_DRAINED:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)

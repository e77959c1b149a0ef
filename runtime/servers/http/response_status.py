"""The status of a response, for applications that wrap another one."""

from collections.abc import MutableMapping
from typing import Any

from starlette.types import Send


class ResponseStatus:
    """A ``send`` that passes on the messages of a response. ``status``: its HTTP status, 0 before there is one."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0

    async def __call__(self, message: MutableMapping[str, Any]) -> None:
        self.status = message.get("status", self.status)
        await self._send(message)

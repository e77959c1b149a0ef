"""One replica: the application of ``tandemrt serve``, called with whole requests instead of connections."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ray import serve
from starlette.types import Message

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import Closed
from tandemrt.runtime.servers.http.access_log import log_to_stderr
from tandemrt.runtime.servers.http.app import create_app
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.server import open_models
from tandemrt.runtime.servers.openai.served_models import Models


@dataclass(frozen=True)
class WholeResponse:
    """A response of one replica, complete."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Replica:
    """Opens the bundles in ``folders`` and answers requests for them. Ray runs one in a process of its own."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, folders: Mapping[str, Path], options: RuntimeOptions, config: ServerConfig
    ) -> None:
        log_to_stderr(config.log_level)
        self._resources = AsyncExitStack()
        self._models = self._resources.enter_context(open_models(folders, options))
        self._app = create_app(self._models, config)
        await self._resources.enter_async_context(self._app.router.lifespan_context(self._app))

    async def __del__(self) -> None:  # Ray awaits it when the replica has drained
        await self._resources.aclose()

    def check_health(self) -> None:
        require_open(self._models)

    async def respond(self, scope: Mapping[str, Any], body: bytes) -> AsyncIterator[list[Message]]:
        """Yield the ASGI messages of the response to a request, all that are there at a time.

        The request is cancelled when the iteration ends early.
        """
        messages: list[Message] = []
        changed = asyncio.Event()
        requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if requests:
                return requests.pop()
            await asyncio.Event().wait()  # a client that disconnects cancels the task
            raise AssertionError

        async def send(message: Message) -> None:
            messages.append(message)
            changed.set()

        task = asyncio.create_task(self._app(dict(scope), receive, send))
        task.add_done_callback(lambda _: changed.set())
        try:
            while messages or not task.done():
                if not messages:
                    await changed.wait()
                    changed.clear()
                    continue
                ready = messages[:]
                messages.clear()
                yield ready
            task.exception()  # the application has answered it with status 500
        finally:
            task.cancel()

    async def respond_whole(self, scope: Mapping[str, Any]) -> WholeResponse:
        """Return the whole response to a request without a body."""
        replica = serve.get_replica_context().replica_id.unique_id
        start, *parts = [message async for messages in self.respond(scope, b"") for message in messages]
        return WholeResponse(
            replica, start["status"], start["headers"], b"".join(part.get("body", b"") for part in parts)
        )


def require_open(models: Models) -> None:
    """Raise Closed if a model answers no more; Ray then replaces the replica."""
    for name, llm in models.llms.items():
        if llm.closed or llm.problem is not None:
            raise Closed(f"{name}: {llm.problem or 'the engine loop has ended'}; the replica is replaced")

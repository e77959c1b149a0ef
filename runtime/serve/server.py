"""Opening bundles and serving them with uvicorn until somebody stops the server."""

import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.engines.options import RuntimeOptions
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.serve.app import Models, application
from tandemrt.runtime.warmup import warm_up

MOST_CONNECTIONS = 4096
_NAMED = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)=(?P<folder>.+)")


@dataclass(frozen=True)
class Door:
    """Where a server is reached, and what it lets in.

    Attributes:
        port: 0 takes a free one.
        api_key: what requests to /v1 must bring; None: nothing.
        max_body: of a request, in bytes.
        grace_s: how long it finishes what runs when it is asked to stop; None: until that is done.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    max_body: int = 4 << 20
    grace_s: int | None = None


def named(bundles: Sequence[str]) -> dict[str, Path]:
    """Return the folders by the names under which they are served: ``NAME=FOLDER``, or the bundle's own name.

    Raises BadBundle, or BadRequest if two have one name.
    """
    folders: dict[str, Path] = {}
    for given in bundles:
        found = _NAMED.fullmatch(given)
        folder = Path(found["folder"] if found else given)
        name = found["name"] if found else Bundle.read(folder).name
        if name in folders:
            raise BadRequest(
                f"BUNDLE: each must have a name of its own, received {quoted(name)} twice; use NAME=FOLDER"
            )
        folders[name] = folder
    return folders


@contextmanager
def opened(folders: Mapping[str, Path], options: RuntimeOptions, trace: Path | None = None) -> Iterator[Models]:
    """Open the bundles and run their first rounds; they are closed at the end. ``trace`` is LLM's, of one bundle."""
    with ExitStack() as stack:
        llms = {
            name: stack.enter_context(LLM(folder, trace=trace, **options.given())) for name, folder in folders.items()
        }
        for llm in llms.values():
            warm_up(llm)
            if llm.recorder is not None:
                llm.recorder.forget()
        yield Models(llms, created=int(time.time()))


class Server(uvicorn.Server):
    """Serves ``models`` through ``door``; ``ready`` is called with its address once it answers."""

    def __init__(self, models: Models, door: Door, ready: Callable[[str], None]) -> None:
        app = application(models, api_key=door.api_key, max_body=door.max_body)
        super().__init__(
            uvicorn.Config(
                app,
                host=door.host,
                port=door.port,
                access_log=False,
                log_level="warning",
                limit_concurrency=MOST_CONNECTIONS,
                timeout_graceful_shutdown=door.grace_s,
            )
        )
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            self._ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/v1")

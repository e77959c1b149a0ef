"""Open bundles and serve them with uvicorn."""

import asyncio
import logging
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import uvicorn
from fastapi import APIRouter
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.build_options import NO_CHOICES, BuildOptions
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.llm.on_demand import bundle_folder
from tandemrt.runtime.llm.warmup import warm_up
from tandemrt.runtime.servers.http.access_log import AccessLog
from tandemrt.runtime.servers.http.addresses import unavailable
from tandemrt.runtime.servers.http.app import create_app
from tandemrt.runtime.servers.http.cancelled_answers import CancelledAnswers
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.connections import ConnectionLimits, LimitedProtocol
from tandemrt.runtime.servers.http.drained_bodies import DrainedBodies
from tandemrt.runtime.servers.http.hosts import KnownHosts
from tandemrt.runtime.servers.http.tracing import exports_traces
from tandemrt.runtime.servers.openai.served_models import Models

if TYPE_CHECKING:
    from tandemrt.runtime.servers.http.spans import RequestSpans

log = logging.getLogger(__name__)

FLUSH_S = 5.0  # for clients to take their last answer
_POLL_S = 0.05
_BACKLOG = 2048  # connections that wait to be accepted
_ACCEPTED_AT_ONCE = 8  # between two other events of the loop: a flood of connections must not delay answers
_NAME_AND_FOLDER = re.compile(r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)=(?P<folder>.+)")


def bundles_by_name(models: Sequence[str], options: BuildOptions = NO_CHOICES) -> dict[str, Path]:
    """Return the bundle folders by model name: ``NAME=MODEL``, or a model under its bundle's own name.

    A model that is not a bundle is built with ``options``. Raises BadBundle, BadRecipe or BadCheckpoint, or BadRequest
    if two models have the same name.
    """
    folders: dict[str, Path] = {}
    for argument in models:
        match = _NAME_AND_FOLDER.fullmatch(argument)
        folder = bundle_folder(match["folder"] if match else argument, options)
        name = match["name"] if match else Bundle.read(folder).name
        if name in folders:
            raise BadRequest(
                f"BUNDLE: each must have a name of its own, received {quoted(name)} twice; use NAME=FOLDER"
            )
        folders[name] = folder
    return folders


@contextmanager
def open_models(folders: Mapping[str, Path], options: RuntimeOptions, trace: Path | None = None) -> Iterator[Models]:
    """Open the bundles in ``folders``, warm them up, and close them at the end.

    ``trace`` is the ``trace`` argument of LLM, for one bundle. It does not contain the warm-up.
    """
    later = len(folders) == 1  # no bundle may open while another one captures graphs
    with ExitStack() as stack:
        llms: dict[str, LLM] = {}
        for name, folder in folders.items():
            log.info("opening %s: %s", name, folder)
            llms[name] = stack.enter_context(LLM(folder, trace=trace, warm_up_later=later, **options.arguments()))
        for llm in llms.values():
            warm_up(llm)
            if llm.recorder is not None:
                llm.recorder.clear()
        yield Models(llms, created=int(time.time()))


def guarded(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    """Wrap ``app`` with what does not depend on how it answers: host names, pages of other origins, log, bodies."""
    if config.host_names is not None:
        app = KnownHosts(app, config.host_names)
    if config.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["Retry-After"],
        )
    return DrainedBodies(AccessLog(app), config.body_timeout_s)


class Server(uvicorn.Server):
    """Serves ``models`` and ``routers``. ``on_ready`` receives the server's URL once it accepts requests.

    SIGTERM or SIGINT ends ``run``. The grace period is for requests; a second SIGINT ends it. A client that has not
    taken its last answer FLUSH_S later is disconnected.
    """

    def __init__(
        self,
        models: Models,
        config: ServerConfig,
        on_ready: Callable[[str], None],
        routers: Sequence[APIRouter] = (),
    ) -> None:
        app = guarded(CancelledAnswers(create_app(models, config, routers)), config)
        self._spans: RequestSpans | None = None
        if exports_traces(config.otlp_traces_endpoint):
            from tandemrt.runtime.servers.http import spans  # an extra

            app = self._spans = spans.RequestSpans(app, config.otlp_traces_endpoint)
        super().__init__(
            uvicorn.Config(
                app,
                host=config.host,
                port=config.port,
                backlog=_ACCEPTED_AT_ONCE,
                http=partial(LimitedProtocol, limits=ConnectionLimits(config)),  # type: ignore[arg-type]  # is called
                loop="asyncio",  # the tested one, also where another package has brought uvloop
                ws="none",
                proxy_headers=bool(config.trusted_proxies),
                forwarded_allow_ips=[*config.trusted_proxies],
                access_log=False,
                log_level="warning",
                ssl_certfile=config.ssl_certfile,
                ssl_keyfile=config.ssl_keyfile,
            )
        )
        self._settings = config
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            for listener in sockets or []:
                listener.listen(_BACKLOG)
        except OSError as error:  # another server bound the port at the same time and listens first
            raise unavailable(self._settings, error) from error
        await super().startup(sockets)
        for listener in (each for server in self.servers for each in server.sockets):
            with listener.dup() as own:
                own.listen(_BACKLOG)  # asyncio has set it to what it accepts at a time
        if self.started:
            host, port = self.servers[0].sockets[0].getsockname()[:2]
            scheme = "https" if self.config.is_ssl else "http"
            self._on_ready(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/v1")

    def handle_exit(self, sig: int, _frame: FrameType | None) -> None:
        """Stop at a signal. uvicorn would raise the signal again at the end, which skips closing the models."""
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Finish running requests within the grace period, answer the others with RequestCancelled, and disconnect."""
        log.info("shutting down: %d requests are running", len(self.server_state.tasks))
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await self._wait(self._settings.grace_s, lambda: self.force_exit or not self.server_state.tasks)
        if self.server_state.tasks:
            log.warning("the grace period is over: %d requests are cancelled", len(self.server_state.tasks))
        for task in list(self.server_state.tasks):
            task.cancel()
        await self._wait(FLUSH_S, self._idle)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await self._wait(FLUSH_S, self._idle)
        await self.lifespan.shutdown()
        if self._spans is not None:
            self._spans.close()  # not in a thread, which could be refused: no request is left to delay
        log.info("shut down after %d requests", self.server_state.total_requests)

    def _idle(self) -> bool:
        return not self.server_state.connections and not self.server_state.tasks

    async def _wait(self, seconds: float | None, holds: Callable[[], bool]) -> None:
        """Wait until ``holds`` is true, or for some seconds; None: without a limit."""
        end = None if seconds is None else time.monotonic() + seconds
        while not holds() and (end is None or time.monotonic() < end):
            await asyncio.sleep(_POLL_S)

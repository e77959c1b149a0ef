"""Log one line per request: client, path, status, time, and what the engine generated for it."""

import logging
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from tandemrt.engines.validation.errors import clipped, quoted
from tandemrt.runtime.requests.request import Speculation
from tandemrt.runtime.servers.http.generated import Generated, generated_of
from tandemrt.runtime.servers.http.hosts import is_address
from tandemrt.runtime.servers.http.response_status import ResponseStatus

log = logging.getLogger(__name__)

_PROBES = ("/health", "/metrics", "/dashboard/trace")  # logged at the level debug


class AccessLog:
    """Wraps an application: logs every request when its response has ended."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        level = logging.DEBUG if scope.get("path") in _PROBES else logging.INFO
        if scope["type"] != "http" or not log.isEnabledFor(level):
            await self._app(scope, receive, send)
            return
        response, start = ResponseStatus(send), time.monotonic()
        try:
            await self._app(scope, receive, response)
        finally:
            milliseconds = 1000 * (time.monotonic() - start)
            client = scope["client"][0] if scope["client"] else "-"
            if client != "-" and not is_address(client):  # what a trusted proxy passed on
                client = quoted(client)
            method, path, figures = clipped(scope["method"]), quoted(scope["path"]), _figures(generated_of(scope))
            log.log(level, "%s %s %s %d %.0f ms%s", client, method, path, response.status, milliseconds, figures)


def log_to_stderr(level: str) -> None:
    """Print the log of this package to stderr, from ``level`` ("debug", "info", ...) on."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    package = logging.getLogger("tandemrt")
    package.handlers = [handler]
    package.setLevel(level.upper())


def _figures(generated: Generated | None) -> str:
    """Return tokens and tokens per round of the outputs that have finished."""
    requests = [] if generated is None else generated.outputs()
    outputs = [request.output for request in requests if request.output is not None]
    if not outputs:
        return ""
    rounds = Speculation.total([output.speculation for output in outputs]).mean_acceptance_length
    return f" {sum(len(output.token_ids) for output in outputs)} tokens {rounds:.2f} tokens/round"

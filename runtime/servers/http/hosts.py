"""Accept requests for this server's names only.

A web page can point a name of its own at this machine, and its scripts then reach a server without a key. They cannot
choose the header Host, which says the name. An address as Host is therefore harmless.
"""

import ipaddress
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from tandemrt.engines.validation.errors import quoted
from tandemrt.runtime.servers.openai.errors import UnknownHost, error_response
from tandemrt.runtime.servers.openai.protocols import endpoint_of


class KnownHosts:
    """Wraps an application: a request whose Host is neither an address, localhost nor in ``names`` gets 403."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = {"localhost", *(name.lower() for name in names)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
            if not self._known(host):
                error = UnknownHost(
                    f"Host: must be an address, localhost or a name of --allowed-hosts, received {quoted(host)}; add it"
                )
                answer = error_response(error, body=endpoint_of(scope["path"]).error)
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _known(self, host: str) -> bool:
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        return name.lower() in self._names or is_address(name)


def is_address(text: str) -> bool:
    """Whether ``text`` is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True

"""Limit the connections of a server: how many, how many per address, and how long each may be silent."""

import asyncio
import ipaddress
import resource
import select
import socket
import sys
from collections import Counter
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any
from weakref import ref

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from tandemrt.engines.validation.errors import BadRequest, TandemError, clipped
from tandemrt.runtime.servers.http.config import MAX_CONNECTIONS, ServerConfig
from tandemrt.runtime.servers.http.framing import StrictConnection
from tandemrt.runtime.servers.openai.errors import HeaderTimeout, Overloaded, error_response, status_of

MAX_REFUSED = 64  # open connections beyond the limits, which get 503, or an answer of /health
REFUSED_TIMEOUT_S = 5.0  # for the head of a request on one of them
HEALTH = "/health"
WRITE_PART = "tandemrt.write_part"
"""Extension of ASGI: writes a part of a response that has begun, at once, and returns whether it could."""
OTHER_FILES = 256  # files that a server opens in addition to connections
MAX_HEAD = 16 << 10  # bytes of a request's head
_RECEIVED = memoryview(bytearray(16 << 10))  # what one call parses; shared, because a call ends before the next begins
_UNSENT = 16 << 10  # bytes of responses that the kernel keeps in addition to those that the client's kernel has
_LEAVING_S = 1.0  # between two looks at a connection that is not read
_HUNG_UP = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)  # the last one is of Linux


class ConnectionLimits:
    """Counts open connections, and decides which may send requests. Used in the event loop only.

    A connection beyond the limits stays open for one request: /health is answered, any other path gets 503. At most
    MAX_REFUSED such connections are open; a further one closes the oldest. So /health stays reachable, even if other
    clients hold all other connections.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.header_timeout_s = config.header_timeout_s
        self.write_timeout_s = config.write_timeout_s
        self._most = config.connections_limit
        self._most_per_address = config.address_limit
        self._open: Counter[str] = Counter()  # by network
        self._refused: dict[LimitedProtocol, None] = {}  # oldest first

    def enter(self, connection: "LimitedProtocol", network: str) -> Overloaded | None:
        """Count a new connection. Returns the error of its requests if it is beyond a limit."""
        if self._open.total() >= self._most:
            error = Overloaded(f"the server has {self._most} connections (--max-connections); connect later")
        elif self._open[network] >= self._most_per_address:
            error = Overloaded(
                f"the server has {self._most_per_address} connections from this address "
                "(--max-connections-per-address); close one first"
            )
        else:
            self._open[network] += 1
            return None
        if len(self._refused) >= MAX_REFUSED:
            oldest = next(iter(self._refused))
            del self._refused[oldest]
            oldest.transport.abort()
        self._refused[connection] = None
        return error

    def leave(self, connection: "LimitedProtocol", network: str, *, refused: bool) -> None:
        """Count a closed connection."""
        if refused:
            self._refused.pop(connection, None)
            return
        self._open[network] -= 1
        if not self._open[network]:
            del self._open[network]


class LimitedProtocol(H11Protocol, asyncio.BufferedProtocol):
    """uvicorn's HTTP connection within ``limits``.

    The head of a request must come in time, and the client must take each part of a response in time. One call of the
    event loop parses a few kilobytes, so that no client delays others for long.
    """

    def __init__(self, *, limits: ConnectionLimits, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self.conn = StrictConnection(MAX_HEAD)
        self._limits = limits
        self._network = ""
        self._refusal: Overloaded | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_begun = False
        self._write_timer: asyncio.TimerHandle | None = None
        self._leaving_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn does
        super().connection_made(transport)
        # A response waits for its client, and the timer runs meanwhile. With 0, TLS pauses while nothing waits.
        transport.set_write_buffer_limits(high=1)
        _limit_unsent(transport.get_extra_info("socket"))
        self._network = client_network(self.client[0] if self.client else "")
        self._refusal = self._limits.enter(self, self._network)
        if self._refusal is not None:
            self.app = _Refusing(self.app, self._refusal)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        for timer in (self._write_timer, self._leaving_timer):
            if timer is not None:
                timer.cancel()
        self._limits.leave(self, self._network, refused=self._refusal is not None)
        super().connection_lost(exc)

    def get_buffer(self, _size_hint: int) -> memoryview:
        return _RECEIVED

    def buffer_updated(self, size: int) -> None:
        self._head_begun = True
        self.data_received(bytes(_RECEIVED[:size]))

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None:
            extensions: Any = {WRITE_PART: partial(self._write_part, ref(self.cycle))}  # which refers to them
            self.cycle.scope["extensions"] = extensions
        self._watch_head()
        self._watch_leaving()

    def _write_part(self, response: ref[RequestResponseCycle], part: bytes) -> bool:
        """See WRITE_PART. It cannot while the client has not taken the part before it."""
        cycle = response()
        if cycle is None or cycle.response_complete or not cycle.response_started:
            return False
        if self.flow.write_paused or cycle.disconnected:
            return False
        self.transport.write(self.conn.send(h11.Data(data=part)) or b"")
        return True

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP request. uvicorn calls this while it handles the error."""
        self._close_with(BadRequest(f"HTTP: {msg} {clipped(sys.exception())}"))

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def _watch_leaving(self) -> None:
        """Begin to look whether the client is still there, if the next request is not read before this one's end."""
        running = self.cycle is not None and not self.cycle.response_complete
        if running and self.flow.read_paused and self._leaving_timer is None:
            self._leaving_timer = self.loop.call_later(_LEAVING_S, self._check_leaving)

    def _check_leaving(self) -> None:
        self._leaving_timer = None
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket"), _HUNG_UP)
        if self.flow.read_paused and poll.poll(0):
            self.transport.abort()
        else:
            self._watch_leaving()

    def _watch_head(self) -> None:
        """Run the timer whenever no request is being answered."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_head_timer()
            self._head_begun = False
            if self._refusal is not None:
                self.cycle.keep_alive = False
        elif self._head_timer is None and not self.transport.is_closing():
            timeout_s = self._limits.header_timeout_s
            if self._refusal is not None:
                timeout_s = min(timeout_s, REFUSED_TIMEOUT_S)
            self._head_timer = self.loop.call_later(timeout_s, self._head_late, timeout_s)

    def _head_late(self, timeout_s: float) -> None:
        self._head_timer = None
        if self._head_begun:
            self._close_with(HeaderTimeout(f"the head of a request must come within {timeout_s:g} seconds; send it"))
        else:
            self.transport.close()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _close_with(self, error: TandemError) -> None:
        """Send the response of ``error`` unless another one has begun, and close the connection."""
        if not self.transport.is_closing() and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error_response(error)
            headers = [*response.raw_headers, (b"connection", b"close")]
            events = (
                h11.Response(status_code=status_of(error).status, headers=headers),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            )
            for event in events:
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _limit_unsent(connection: socket.socket) -> None:
    """Let a connection wait for its client early: by default the kernel takes megabytes that are not read."""
    with suppress(OSError):  # a Unix socket, or a kernel without this option
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)


class _Refusing:
    """Answers every path but /health with an error."""

    def __init__(self, app: ASGIApp, error: Overloaded) -> None:
        self._app = app
        self._error = error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app if scope["path"] == HEALTH else error_response(self._error, {"Connection": "close"})
        await answer(scope, receive, send)


@lru_cache(maxsize=1024)  # every request asks several times
def client_network(host: str) -> str:
    """Return the address, or an IPv6 address's /64 network: a client has many addresses of one network."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # no address: a Unix socket
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return f"{ipaddress.IPv6Address(int(address) >> 64 << 64)}/64"
    return host


def allow_connections(wanted: int | None) -> int:
    """Raise this process's limit of open files for ``wanted`` connections, and return their number.

    None: MAX_CONNECTIONS, or as many as the hard limit allows. Raises BadRequest if it does not allow ``wanted``.
    """
    spare = MAX_REFUSED + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    possible = MAX_CONNECTIONS + spare if hard == resource.RLIM_INFINITY else hard
    if wanted is None:
        wanted = max(1, min(MAX_CONNECTIONS, possible - spare))
    elif hard != resource.RLIM_INFINITY and wanted > hard - spare:
        raise BadRequest(
            f"max_connections: the limit of open files ({hard}) allows {hard - spare}, received {wanted}; lower it or "
            "raise the limit (ulimit -Hn)"
        )
    if soft != resource.RLIM_INFINITY and soft < wanted + spare:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(wanted + spare, possible), hard))
    return wanted

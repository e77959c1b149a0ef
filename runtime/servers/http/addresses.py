"""Take the address and port of a server before anything slow starts."""

import errno
import socket
from contextlib import ExitStack

from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.runtime.servers.http.config import ServerConfig


def bind(config: ServerConfig) -> list[socket.socket]:
    """Return sockets bound to every address of the host. They do not listen yet, so clients are refused.

    Raises BadRequest if the host has no address here, or if the port is taken or not allowed.
    """
    host, port = config.host, config.port
    try:
        resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadRequest(f"--host: must be an address of this machine, received {quoted(host)}: {error}") from error
    with ExitStack() as opened:
        sockets: list[socket.socket] = []
        for family, kind, protocol, _, address in dict.fromkeys(resolved):
            try:
                listener = opened.enter_context(socket.socket(family, kind, protocol))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                listener.bind(address)
            except OSError as error:
                raise unavailable(config, error) from error
            sockets.append(listener)
        opened.pop_all()
        return sockets


def unavailable(config: ServerConfig, error: OSError) -> BadRequest:
    """Return the error of a server whose address cannot be taken because of ``error``."""
    if error.errno == errno.EADDRINUSE:
        rule = f"--port: must be free on {clipped(config.host)}, received {config.port}, which another program uses"
        return BadRequest(f"{rule}; choose another, or 0 for a free one")
    if error.errno in (errno.EACCES, errno.EPERM):
        rule = f"--port: must be one that this user may take, received {config.port}"
        return BadRequest(f"{rule}; choose one above 1023, or 0 for a free one")
    return BadRequest(f"--host: must be an address of this machine, received {quoted(config.host)}: {error.strerror}")

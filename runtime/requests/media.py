"""Fetch images from web addresses of allowed domains: within limits, and never from this machine's own networks."""

import http.client
import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from urllib.parse import SplitResult, urljoin, urlsplit

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.runtime.workers.fair import released_worker

_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 3
_PORTS = {"http": 80, "https": 443}


def addresses_of(host: str, port: int) -> list[str]:
    """Return the addresses of ``host``."""
    return [str(place[0]) for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]


@dataclass(frozen=True)
class MediaFetcher:
    """Fetches URLs of ``domains`` and their subdomains, with redirects among them.

    A name is resolved once, and the connection goes to the address that was checked. ``most``: bytes of a file.
    ``timeout_s``: of all of a fetch.
    """

    domains: Sequence[str]
    most: int
    timeout_s: float
    resolve: Callable[[str, int], Sequence[str]] = addresses_of
    connect: Callable[[tuple[str, int], float], socket.socket] = socket.create_connection

    @classmethod
    def of(cls, options: RuntimeOptions) -> "MediaFetcher | None":
        """Return the fetcher that ``options`` allow; None: they allow no domain."""
        names = [name.strip().lower() for name in (options.allowed_media_domains or "").split(",")]
        domains = [name for name in names if name]
        return cls(domains, options.max_image_bytes, options.prompt_timeout_s) if domains else None

    def fetch(self, url: str) -> bytes:
        """Return the body of ``url``. Raises BadRequest."""
        deadline = time.monotonic() + self.timeout_s
        with released_worker():
            for _ in range(1 + _MOST_REDIRECTS):
                try:
                    body, url = self._get(url, deadline)
                except BadRequest:
                    raise
                except (OSError, ValueError, http.client.HTTPException) as error:
                    raise BadRequest(f"image: {quoted(url)} could not be fetched: {clipped(error)}; send it") from None
                if body is not None:
                    return body
        raise BadRequest(f"image: at most {_MOST_REDIRECTS} redirects, received more up to {quoted(url)}; send it")

    def _get(self, url: str, deadline: float) -> tuple[bytes | None, str]:
        """Return the body of ``url`` and ``url``, or None and where it redirects to."""
        parts = urlsplit(url)
        host, port = self._checked(url, parts)
        with self._connected(url, host, port, deadline) as raw, _ended_at(deadline, raw):
            connection = http.client.HTTPConnection(host, port)
            connection.sock = raw if parts.scheme == "http" else _tls().wrap_socket(raw, server_hostname=host)
            path = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
            connection.request("GET", path, headers={"accept": "image/*", "user-agent": "tandemrt"})
            with connection.getresponse() as answer:
                if answer.status in _REDIRECTS and (place := answer.getheader("location")):
                    return None, urljoin(url, place)
                if answer.status != 200:
                    raise BadRequest(f"image: {quoted(url)} must be answered with status 200, received {answer.status}")
                data = answer.read(self.most + 1)
            connection.close()
        if len(data) > self.most:
            raise BadRequest(f"image: at most {self.most} bytes (max_image_bytes), {quoted(url)} has more; resize it")
        return data, url

    def _checked(self, url: str, parts: SplitResult) -> tuple[str, int]:
        host = (parts.hostname or "").rstrip(".")
        port = _PORTS.get(parts.scheme)
        if port is None or parts.username is not None or parts.port not in (None, port):
            raise BadRequest(
                f"image: must be an http or https URL without a user and with the usual port, received {quoted(url)}; "
                "send the image itself"
            )
        if not any(host == domain or host.endswith(f".{domain}") for domain in self.domains):
            raise BadRequest(
                f"image: web addresses are fetched from {clipped(', '.join(self.domains))} alone "
                f"(allowed_media_domains), received {quoted(url)}; send the image itself"
            )
        return host, port

    def _connected(self, url: str, host: str, port: int, deadline: float) -> socket.socket:
        addresses = self.resolve(host, port)
        if not addresses or not all(map(_is_public, addresses)):
            raise BadRequest(f"image: {quoted(url)} must have public addresses only; send the image itself")
        return self.connect((addresses[0], port), _left(deadline))


@contextmanager
def _ended_at(deadline: float, connected: socket.socket) -> Iterator[None]:
    """Shut the connection down at ``deadline``, however slowly its other end sends."""
    connected.settimeout(_left(deadline))
    timer = threading.Timer(_left(deadline), connected.shutdown, [socket.SHUT_RDWR])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    _left(deadline)


def _is_public(address: str) -> bool:
    parsed = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(parsed, ipaddress.IPv6Address):
        inner = parsed.ipv4_mapped or parsed.sixtofour or (parsed.teredo or (None, None))[1]
        if inner is not None and not _is_public(str(inner)):
            return False
        if parsed in ipaddress.ip_network("64:ff9b::/96"):  # translated to the IPv4 address in its last bytes
            return _is_public(str(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF)))
        parsed = parsed.ipv4_mapped or parsed
    return parsed.is_global and not parsed.is_multicast


def _left(deadline: float) -> float:
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError("it took too long (prompt_timeout_s)")
    return left


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()

"""Address and limits of a server."""

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.servers.http.cache_salts import SaltBy
from tandemrt.runtime.servers.http.certificate import require_certificate

MAX_CONNECTIONS = 4096
# What the value of a header cannot hold. A byte of the environment that is not UTF-8 becomes a lone surrogate.
_UNSENDABLE = re.compile(r"^ |[\x00-\x1f\x7f\ud800-\udfff]| $")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,]+")


@dataclass(frozen=True)
class ServerConfig:
    """Address and limits of a server. Raises BadRequest if they contradict each other.

    Attributes:
        port: 0 takes a free port.
        api_key: key that all requests but those to /health must send; None: no key.
        metrics_without_key: whether /metrics answers without the key.
        dashboard_texts: whether the dashboard shows the text of one running request to all who have the key.
        allowed_origins: origins of pages in browsers that may use the server (CORS), ``*`` for all; none: only its own
            pages.
        ssl_certfile: PEM file with the certificate chain; the server then speaks HTTPS only.
        ssl_keyfile: PEM file with its private key; None: ``ssl_certfile`` contains it.
        max_body: largest request body in bytes.
        max_bodies: bytes of all request bodies until their prompts are queued, of parts that answers repeat until the
            answers end, and of answers until their clients have taken them; None: 16 times ``max_body``. One client
            address gets at most half.
        max_answer: bytes of what an answer may hold besides its texts: logprobs, token ids, repeated prompts.
        max_connections: open connections that may send requests.
        max_connections_per_address: open connections of one address (IPv6: of one /64 network); None: a quarter of all.
        header_timeout_s: seconds in which a connection must send the head of its request.
        body_timeout_s: seconds in which the body must follow.
        write_timeout_s: seconds in which a client must take each part of a response, at most 64 KiB.
        otlp_traces_endpoint: URL that receives OpenTelemetry traces; None: that of OpenTelemetry's environment
            variables, if they name one.
        allowed_hosts: names that clients may call the server by, besides its addresses and localhost; None: ``host`` if
            that is an address of this machine alone, else any.
        trusted_proxies: addresses or networks of proxies whose X-Forwarded-For names the client.
        salt_cache_by: whose requests share cached prefixes: those of an address (IPv6: of one /64 network), or those
            with the same key; None: all.
        grace_s: seconds that running requests get after a stop signal; None: until they finish.
        batch_folder: folder of the files and batches of /v1/files and /v1/batches; None: neither is served.
        batch_bytes: bytes that these files may have in all.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    metrics_without_key: bool = False
    dashboard_texts: bool = False
    allowed_origins: Sequence[str] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    max_body: int = 4 << 20
    max_bodies: int | None = None
    max_answer: int = 16 << 20
    max_connections: int = MAX_CONNECTIONS
    max_connections_per_address: int | None = None
    header_timeout_s: float = 30.0
    body_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    otlp_traces_endpoint: str | None = None
    allowed_hosts: tuple[str, ...] | None = None
    trusted_proxies: tuple[str, ...] = ()
    salt_cache_by: SaltBy | None = None
    grace_s: int | None = None
    batch_folder: Path | None = None
    batch_bytes: int = 4 << 30

    def __post_init__(self) -> None:
        if self.api_key is not None and (_UNSENDABLE.search(self.api_key) or not self.api_key):
            received = f"{len(self.api_key)} characters" if self.api_key else "an empty text"  # never the key
            raise BadRequest(
                "api_key: must be UTF-8 without control characters, line breaks and spaces at its ends, received "
                f"{received}; set --api-key or TANDEMRT_API_KEY to a key, or leave both out to serve without one"
            )
        for proxy in self.trusted_proxies:
            if not _is_network(proxy):
                raise BadRequest(
                    f"trusted_proxies: must be addresses or networks such as 10.0.0.0/8, received {quoted(proxy)}; "
                    "correct it"
                )
        for origin in self.allowed_origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise BadRequest(
                    f"allowed_origins: must be * or a scheme, a host and no path, received {quoted(origin)}; set "
                    "--allowed-origins to an origin such as https://example.org, once for each"
                )
        if self.ssl_certfile is not None or self.ssl_keyfile is not None:
            require_certificate(self.ssl_certfile, self.ssl_keyfile)
        if self.bodies_limit < 2 * self.max_body:
            raise BadRequest(
                f"max_bodies: must be at least twice max_body ({self.max_body}), because one client address gets half, "
                f"received {self.max_bodies}; raise it or lower max_body"
            )
        if not 1 <= self.address_limit <= self.max_connections:
            raise BadRequest(
                f"max_connections_per_address: must be 1 to max_connections ({self.max_connections}), received "
                f"{self.address_limit}; choose a number between them"
            )

    @property
    def bodies_limit(self) -> int:
        """``max_bodies``, or its default."""
        return 16 * self.max_body if self.max_bodies is None else self.max_bodies

    @property
    def host_names(self) -> tuple[str, ...] | None:
        """``allowed_hosts``, or its default. None: any."""
        if self.allowed_hosts is not None:
            return None if "*" in self.allowed_hosts else (*self.allowed_hosts, self.host)
        local = self.host == "localhost" or (_is_network(self.host) and ipaddress.ip_network(self.host).is_loopback)
        return (self.host,) if local else None

    @property
    def address_limit(self) -> int:
        """``max_connections_per_address``, or its default."""
        configured = self.max_connections_per_address
        return max(1, self.max_connections // 4) if configured is None else configured


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True

"""Address and limits of a server, and the options of ``tandemrt serve`` that set them."""

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from tandemrt.engines.options.command_options import LIMITS, SERVER
from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.runtime.servers.http.certificate import require_certificate

MAX_CONNECTIONS = 4096
KEY_VARIABLE = "TANDEMRT_API_KEY"  # of the environment
SaltBy = Literal["address", "key"]
# What the value of a header cannot hold. A byte of the environment that is not UTF-8 becomes a lone surrogate.
_UNSENDABLE = re.compile(r"^ |[\x00-\x1f\x7f\ud800-\udfff]| $")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#@\s,]+")


@dataclass(frozen=True)
class ServerConfig:
    """Address and limits of a server. Raises BadRequest if they contradict each other.

    A field is an option of ``tandemrt serve`` with its name, type, bounds, help and default
    (runtime/cli/server_options.py).
    """

    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0: all interfaces.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000
    api_key: Annotated[
        str | None, Option(help=f"Key that clients must send. Default: that of {KEY_VARIABLE}, else no key.")
    ] = None
    metrics_without_key: Annotated[
        bool, Option(help="Serve /metrics to clients without the key.", rich_help_panel=SERVER)
    ] = False
    dashboard_texts: Annotated[
        bool,
        Option(
            help="Show the text of one running request on /dashboard, to all who have the key.", rich_help_panel=SERVER
        ),
    ] = False
    allowed_origins: Annotated[
        list[str] | None,
        Option(
            help="Origin of pages in browsers that may use the server, such as https://example.org, or * for all; "
            "once for each. Default: only the server's own pages.",
            rich_help_panel=SERVER,
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None,
        Option(help="PEM file with a certificate chain: serve HTTPS instead of HTTP.", rich_help_panel=SERVER),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        Option(help="PEM file with its private key, unless --ssl-certfile has it.", rich_help_panel=SERVER),
    ] = None
    max_body: Annotated[int, Option(min=1, help="Largest request body, in bytes.", rich_help_panel=LIMITS)] = 4 << 20
    max_bodies: Annotated[  # until prompts are queued; of parts that answers repeat, and of untaken answers
        int | None,
        Option(
            min=1, help="Bytes of all request bodies at a time; default: 16 times --max-body.", rich_help_panel=LIMITS
        ),
    ] = None
    max_answer: Annotated[
        int,
        Option(
            min=1,
            help="Bytes that an answer may hold besides its texts: logprobs, token ids, repeated prompts.",
            rich_help_panel=LIMITS,
        ),
    ] = 16 << 20
    max_connections: Annotated[
        int | None,
        Option(
            min=1,
            help="Open connections; default: 4096, or what the limit of open files allows.",
            rich_help_panel=LIMITS,
        ),
    ] = None
    max_connections_per_address: Annotated[  # IPv6: of one /64 network
        int | None,
        Option(
            min=1, help="Open connections of one client address; default: a quarter of all.", rich_help_panel=LIMITS
        ),
    ] = None
    header_timeout_s: Annotated[
        float,
        Option(
            min=0.1, help="Seconds in which a connection must send the head of its request.", rich_help_panel=LIMITS
        ),
    ] = 30.0
    body_timeout_s: Annotated[
        float, Option(min=0.1, help="Seconds in which the body must follow.", rich_help_panel=LIMITS)
    ] = 30.0
    write_timeout_s: Annotated[  # a part has at most 64 KiB
        float,
        Option(min=0.1, help="Seconds in which a client must take each part of a response.", rich_help_panel=LIMITS),
    ] = 30.0
    allowed_hosts: Annotated[
        tuple[str, ...] | None,
        Option(
            help="Names, separated by commas, that clients may call the server by besides its addresses and localhost; "
            "*: any. Default: none on a loopback address, else any.",
            rich_help_panel=SERVER,
        ),
    ] = None
    trusted_proxies: Annotated[
        tuple[str, ...],
        Option(
            help="Addresses or networks, separated by commas, of proxies whose X-Forwarded-For names the client.",
            rich_help_panel=SERVER,
        ),
    ] = ()
    salt_cache_by: Annotated[
        SaltBy | None,
        Option(
            help="Share cached prefixes only between requests of one address, or of one key. Default: between all.",
            rich_help_panel=SERVER,
        ),
    ] = None
    grace_s: Annotated[
        int | None,
        Option(
            min=0,
            help="Seconds that running requests get after a stop signal; default: no limit.",
            rich_help_panel=SERVER,
        ),
    ] = None
    batch_folder: Annotated[
        Path | None,
        Option(
            help="Folder for files and batches: serve /v1/files and /v1/batches. Default: neither is served.",
            rich_help_panel=SERVER,
        ),
    ] = None
    batch_bytes: Annotated[int, Option(min=1, help="Bytes of all files in --batch-folder.", rich_help_panel=LIMITS)] = (
        4 << 30
    )
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option(help="Least severe messages to print; info: one line per request.", rich_help_panel=SERVER),
    ] = "info"
    otlp_traces_endpoint: Annotated[
        str | None,
        Option(
            help="URL that receives OpenTelemetry traces, over HTTP. Default: that of OTEL_EXPORTER_OTLP_ENDPOINT.",
            rich_help_panel=SERVER,
        ),
    ] = None

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
        for origin in self.allowed_origins or ():
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
        if not 1 <= self.address_limit <= self.connections_limit:
            raise BadRequest(
                f"max_connections_per_address: must be 1 to max_connections ({self.connections_limit}), received "
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
    def connections_limit(self) -> int:
        """``max_connections``, or its default."""
        return MAX_CONNECTIONS if self.max_connections is None else self.max_connections

    @property
    def address_limit(self) -> int:
        """``max_connections_per_address``, or its default."""
        configured = self.max_connections_per_address
        return max(1, self.connections_limit // 4) if configured is None else configured


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text, strict=False)
    except ValueError:
        return False
    return True

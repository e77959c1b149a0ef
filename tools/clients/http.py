"""HTTP requests to a server on this machine, and server-sent events."""

import http.client
import json
from collections.abc import Generator, Mapping
from contextlib import closing
from typing import Any

TIMEOUT_S = 600.0
MIN_QUEUE_LIMIT = 256  # requests that a started server may queue, at least
JSON = {"Content-Type": "application/json"}
Body = bytes | Mapping[str, Any]


def post(port: int, path: str, body: Body, source: str = "127.0.0.1") -> bytes:
    """Send ``body`` (a mapping is sent as JSON) from a local address, and return the response's body."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, TIMEOUT_S, (source, 0))) as connection:
        connection.request("POST", path, encode(body), JSON)
        with connection.getresponse() as response:
            return response.read()


def get(port: int, path: str, source: str) -> int:
    """Request ``path`` from the local address ``source`` and return the status."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, TIMEOUT_S, (source, 0))) as connection:
        connection.request("GET", path)
        return connection.getresponse().status


def post_lines(port: int, path: str, body: Body) -> Generator[bytes]:
    """Send ``body`` and yield the response's lines as they arrive. Closing the generator closes the connection."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", path, encode(body), JSON)
        with connection.getresponse() as response:
            yield from response


def events(data: bytes) -> list[dict[str, Any]]:
    """Parse the JSON objects of a response: its server-sent events, or its single object if it was not streamed."""
    prefix = b"data: {"
    objects = [json.loads(line[len(prefix) - 1 :]) for line in data.splitlines() if line.startswith(prefix)]
    return objects or [json.loads(data)]


def encode(body: Body) -> bytes:
    """Return the bytes of a request's body."""
    return body if isinstance(body, bytes) else json.dumps(body).encode()

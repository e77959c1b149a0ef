"""HTTP clients that misbehave for SECONDS, whatever they request."""

import socket
import time
from collections.abc import Callable

from tools.attack.frontends import HttpFrontend
from tools.clients.http import encode, get

SECONDS = 3.0
ATTACKER = "127.0.0.2"  # limits per address are not the victim's
SILENT = 500  # connections of each attacker: four have more than one address may
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
_ENDLESS = {"prompt": "x", "stream": True, "ignore_eos": True, "user": "attacker"}


def behaviours() -> dict[str, Callable[[HttpFrontend], str]]:
    """Return the behaviours by name. Each runs to its end and returns a summary."""
    return {
        "connections opened and closed": lambda frontend: _repeat(lambda: _connect(frontend).close()),
        "hang-ups": lambda frontend: _repeat(lambda: _hang_up(frontend)),
        "heads and bodies without an end": _half_sent,
        "silent connections": _silent,
        "bodies of 4 MB without an end": lambda frontend: _unfinished(frontend, 50, 4 << 20),
        "readers of a byte at a time": _slow_reader,
        "bodies of 100 MB": lambda frontend: frontend.post("/v1/completions", b" " * (100 << 20)),
        "a flood of ordinary requests": _flood,
    }


def _repeat(attack: Callable[[], object]) -> str:
    end, times, failed = time.perf_counter() + SECONDS, 0, 0
    while time.perf_counter() < end:
        try:
            attack()
            times += 1
        except OSError:  # the server closed the connection
            failed += 1
    return f"{times} times, {failed} failed"


def _flood(frontend: HttpFrontend) -> str:
    return _repeat(lambda: frontend.send({"prompt": "x", "max_tokens": 20}))


def _connect(frontend: HttpFrontend) -> socket.socket:
    return socket.create_connection(("127.0.0.1", frontend.port), timeout=60, source_address=(ATTACKER, 0))


def _request(data: bytes, length: int | None = None) -> bytes:
    return _HEAD + b"Content-Length: %d\r\n\r\n%s" % (length or len(data), data)


def _hang_up(frontend: HttpFrontend) -> None:
    with _connect(frontend) as connection:
        connection.sendall(_request(encode(_ENDLESS)))
        time.sleep(0.01)


def _half_sent(frontend: HttpFrontend) -> str:
    held = []
    try:
        for _ in range(50):
            for beginning in (b"POST /v1/comp", _request(b"{", 99)):
                held.append(_connect(frontend))
                held[-1].sendall(beginning)
        time.sleep(SECONDS)
    finally:
        for connection in held:
            connection.close()
    return f"{len(held)} connections"


def _silent(frontend: HttpFrontend) -> str:
    """Open more connections than an address may have, and ask for /health meanwhile."""
    held = [_connect(frontend) for _ in range(SILENT)]
    try:
        time.sleep(SECONDS)
        health = get(frontend.port, "/health", ATTACKER)
    finally:
        for connection in held:
            connection.close()
    return f"{len(held)} connections, /health {health}"


def _unfinished(frontend: HttpFrontend, clients: int, size: int) -> str:
    """Send all of several bodies but the last byte."""
    held = []
    refused = 0
    try:
        for _ in range(clients):
            connection = _connect(frontend)
            held.append(connection)
            try:
                connection.sendall(_request(b" " * (size - 1), size))
            except OSError:  # refused before its end
                refused += 1
        time.sleep(SECONDS)
    finally:
        for connection in held:
            connection.close()
    return f"{len(held)} bodies, {refused} cut off"


def _slow_reader(frontend: HttpFrontend) -> str:
    end, received = time.perf_counter() + SECONDS, 0
    with _connect(frontend) as connection:
        connection.sendall(_request(encode(_ENDLESS)))
        while time.perf_counter() < end:
            received += len(connection.recv(1))
            time.sleep(0.1)
    return f"{received} bytes"

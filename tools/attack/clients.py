"""Attacks by how a client behaves, for as long as it is given, whatever it asks for: over HTTP alone."""

import json
import socket
import time
from collections.abc import Callable

from tools.attack.faces import Http
from tools.attack.requests import body

SECONDS = 3.0
_ENDLESS = {"prompt": "x", "stream": True, "ignore_eos": True, "user": "attacker"}


def clients() -> dict[str, Callable[[Http], str]]:
    """What each client does, by name; returns how it went."""
    return {
        "connections opened and closed": lambda face: _again(lambda: _connect(face).close()),
        "hang-ups": lambda face: _again(lambda: _hang_up(face)),
        "heads and bodies without an end": _half_sent,
        "readers of a byte at a time": _slow_reader,
        "bodies of 100 MB": lambda face: face.post("/v1/completions", b" " * (100 << 20)),
        "a flood of ordinary requests": lambda face: _again(lambda: face.send({"prompt": "x", "max_tokens": 20})),
    }


def _again(attack: Callable[[], object]) -> str:
    end, times, failed = time.perf_counter() + SECONDS, 0, 0
    while time.perf_counter() < end:
        try:
            attack()
            times += 1
        except OSError:  # the server has answered and hung up
            failed += 1
    return f"{times} times, {failed} failed"


def _connect(face: Http) -> socket.socket:
    return socket.create_connection(("127.0.0.1", face.port), timeout=60)


def _request(data: bytes, length: int | None = None) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (length or len(data), data)


def _hang_up(face: Http) -> None:
    with _connect(face) as connection:
        connection.sendall(_request(json.dumps(_ENDLESS).encode()))
        time.sleep(0.01)


def _half_sent(face: Http) -> str:
    held = []
    try:
        for _ in range(50):
            for beginning in (b"POST /v1/comp", _request(b"{", 99)):
                held.append(_connect(face))
                held[-1].sendall(beginning)
        time.sleep(SECONDS)
    finally:
        for connection in held:
            connection.close()
    return f"{len(held)} connections"


def _slow_reader(face: Http) -> str:
    end, received = time.perf_counter() + SECONDS, 0
    with _connect(face) as connection:
        connection.sendall(_request(body(_ENDLESS)))
        while time.perf_counter() < end:
            received += len(connection.recv(1))
            time.sleep(0.1)
    return f"{received} bytes"

"""HTTP clients that misbehave for SECONDS, whatever they request."""

import socket
import time
from collections.abc import Callable

from tools.clients.http import encode, get
from tools.quality.attack.frontends import HttpFrontend, refused

SECONDS = 3.0
ATTACKER = "127.0.0.2"  # limits per address are not the victim's
SILENT = 500  # connections of each attacker: four have more than one address may
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
_ENDLESS = {"prompt": "x", "stream": True, "ignore_eos": True, "user": "attacker"}

_CHUNKS = b"1\r\n \r\n" * (64 << 10)
_LARGE = {"max_tokens": 97, "logprobs": 20, "ignore_eos": True}
_PROMPT_LOGPROBS = {"prompt": [[70] * 400] * 128, "prompt_logprobs": 20, "max_tokens": 1}
_KEYS = b"{%s}" % b",".join([*(b'"k%d":1' % index for index in range(200_000)), rb'"\ud83d\ude00":1'])
_LISTS = b'{"messages":[{"role":"user","content":"x"}],"tools":[%s]}' % b",".join([b"[]"] * 1_000_000)
_VARIABLES = {
    "messages": [{"role": "user", "content": "x"}],
    "max_tokens": 1,
    "chat_template_kwargs": {f"unread_{index}": 1 for index in range(10_000)},
}


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
        "bodies of one-byte chunks": lambda frontend: _repeat(lambda: _tiny_chunks(frontend)),
        "late bytes, then hang-ups": lambda frontend: _repeat(lambda: _hang_up(frontend, late=b"x")),
        "clients that read nothing": _read_nothing,
        "128 prompts with their logprobs": lambda frontend: frontend.send(_PROMPT_LOGPROBS),
        "128 texts with logprobs": lambda frontend: frontend.send({"prompt": ["x"] * 128} | _LARGE),
        "one text with all logprobs": lambda frontend: frontend.send({"prompt": "x"} | _LARGE),
        "10,000 unread variables": lambda frontend: frontend.send(_VARIABLES),
        "200,000 keys, one with an escaped character": lambda frontend: frontend.post("/v1/completions", _KEYS),
        "1,000,000 lists": lambda frontend: frontend.post("/v1/chat/completions", _LISTS),
        "text/plain": lambda frontend: _status(frontend, b"Content-Type: text/plain\r\n"),
        "another host's name": lambda frontend: _status(frontend, b"Host: evil.example\r\n"),
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


def _hang_up(frontend: HttpFrontend, late: bytes = b"") -> None:
    with _connect(frontend) as connection:
        connection.sendall(_request(encode(_ENDLESS)))
        time.sleep(0.01)
        connection.sendall(late)


def _tiny_chunks(frontend: HttpFrontend) -> None:
    with _connect(frontend) as connection:
        connection.sendall(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(64):
            connection.sendall(_CHUNKS)


def _read_nothing(frontend: HttpFrontend) -> str:
    """Ask for a large answer on many connections, and take none of it."""
    silent = []
    try:
        for _ in range(50):
            silent.append(_connect(frontend))
            silent[-1].sendall(_request(encode({"prompt": "x", "user": "attacker"} | _LARGE)))
        time.sleep(SECONDS)
    finally:
        for connection in silent:
            connection.close()
    return f"{len(silent)} answers"


def _status(frontend: HttpFrontend, header: bytes) -> str:
    """Send a request with ``header`` in place of the usual one of its name, and return the status line."""
    name = header.partition(b":")[0]
    lines = [header if line.startswith(name) else line for line in _HEAD.splitlines(keepends=True)]
    with _connect(frontend) as connection:
        connection.sendall(b"".join(lines) + b"Content-Length: 15\r\n\r\n" + b'{"prompt": "x"}')
        return refused(connection.recv(100).partition(b"\r\n")[0].decode())


def _half_sent(frontend: HttpFrontend) -> str:
    connections = []
    try:
        for _ in range(50):
            for beginning in (b"POST /v1/comp", _request(b"{", 99)):
                connections.append(_connect(frontend))
                connections[-1].sendall(beginning)
        time.sleep(SECONDS)
    finally:
        for connection in connections:
            connection.close()
    return f"{len(connections)} connections"


def _silent(frontend: HttpFrontend) -> str:
    """Open more connections than an address may have, and ask for /health meanwhile."""
    connections = [_connect(frontend) for _ in range(SILENT)]
    try:
        time.sleep(SECONDS)
        health = get(frontend.port, "/health", ATTACKER)
    finally:
        for connection in connections:
            connection.close()
    return f"{len(connections)} connections, /health {health}"


def _unfinished(frontend: HttpFrontend, clients: int, size: int) -> str:
    """Send all of several bodies but the last byte."""
    connections = []
    refused = 0
    try:
        for _ in range(clients):
            connection = _connect(frontend)
            connections.append(connection)
            try:
                connection.sendall(_request(b" " * (size - 1), size))
            except OSError:  # refused before its end
                refused += 1
        time.sleep(SECONDS)
    finally:
        for connection in connections:
            connection.close()
    return f"{len(connections)} bodies, {refused} cut off"


def _slow_reader(frontend: HttpFrontend) -> str:
    end, received = time.perf_counter() + SECONDS, 0
    with _connect(frontend) as connection:
        connection.sendall(_request(encode(_ENDLESS)))
        while time.perf_counter() < end:
            received += len(connection.recv(1))
            time.sleep(0.1)
    return f"{received} bytes"

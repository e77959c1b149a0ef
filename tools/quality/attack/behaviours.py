"""HTTP clients that misbehave for SECONDS, whatever they request."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import randrange
from threading import Lock

from tools.clients.http import encode, get, post
from tools.quality.attack.frontends import REFUSED, HttpFrontend, refused

SECONDS = 3.0
ATTACKER = "127.0.0.2"  # limits per address are not the victim's
SILENT = 500  # connections of each attacker: four have more than one address may
_ONE_AT_A_TIME = Lock()  # for attacks that need room in the cache
_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
_ENDLESS = {"prompt": "x", "stream": True, "ignore_eos": True, "user": "attacker"}

_CHUNKS = b"1\r\n \r\n" * (64 << 10)
_LARGE = {"max_tokens": 97, "logprobs": 20, "ignore_eos": True}
_PROMPT_LOGPROBS = {"prompt": [[70] * 400] * 128, "prompt_logprobs": 20, "max_tokens": 1}
_KEYS = b"{%s}" % b",".join([*(b'"k%d":1' % index for index in range(200_000)), rb'"\ud83d\ude00":1'])
_LISTS = b'{"messages":[{"role":"user","content":"x"}],"tools":[%s]}' % b",".join([b"[]"] * 1_000_000)
_HALF_CHARACTER = rb'{"input":"x","metadata":{"a":"\ud83d"}}'
# Without calls, for which the demo's template has no format: the request would be refused for that.
_INFINITE = b'{"input":"x","max_output_tokens":2,"tool_choice":"none","tools":[%s]}' % (
    b'{"type":"function","name":"f","parameters":{"maximum":1e400}}'
)
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
        "bodies without an end, from forged addresses": _forged,
        "another client's prompt": _cached_prompt,
        "a response that repeats half a character": lambda frontend: _response(frontend, _HALF_CHARACTER),
        "a response that repeats 1e400": lambda frontend: _response(frontend, _INFINITE),
        "128 prompts with their logprobs": lambda frontend: frontend.send(_PROMPT_LOGPROBS),
        "128 texts with logprobs": lambda frontend: frontend.send({"prompt": ["x"] * 128} | _LARGE),
        "one text with all logprobs": lambda frontend: frontend.send({"prompt": "x"} | _LARGE),
        "10,000 unread variables": lambda frontend: frontend.send(_VARIABLES),
        "200,000 keys, one with an escaped character": lambda frontend: frontend.post("/v1/completions", _KEYS),
        "1,000,000 lists": lambda frontend: frontend.post("/v1/chat/completions", _LISTS),
        "text/plain": lambda frontend: _status(frontend, b"Content-Type: text/plain\r\n"),
        "another host's name": lambda frontend: _status(frontend, b"Host: evil.example\r\n"),
        "a body of two lengths": lambda frontend: _status(frontend, b"Transfer-Encoding: chunked\r\n"),
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


def _request(data: bytes, length: int | None = None, head: bytes = _HEAD) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n%s" % (length or len(data), data)


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
    """Send a request with ``header``, which replaces the usual one of its name. Raises RuntimeError if it is served."""
    name = header.partition(b":")[0]
    lines = [line for line in _HEAD.splitlines(keepends=True) if not line.startswith(name)]
    status = _status_line(frontend, _request(b'{"prompt": "x"}', head=b"".join([*lines, header])))
    if " 200 " in status:
        raise RuntimeError(f"{header.decode().strip()}: {status}")
    return refused(status)


def _response(frontend: HttpFrontend, body: bytes) -> str:
    """Ask for a response that could not be written as JSON. Raises RuntimeError unless it is refused."""
    status = _status_line(frontend, _request(body, head=_HEAD.replace(b"completions", b"responses")))
    if " 400 " not in status:
        raise RuntimeError(f"a response that cannot be written: {status}")
    return refused(status)


def _status_line(frontend: HttpFrontend, request: bytes) -> str:
    with _connect(frontend) as connection:
        connection.sendall(request)
        return connection.recv(100).partition(b"\r\n")[0].decode()


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
    with _open_bodies(frontend, [_HEAD] * clients, size) as cut_off:
        time.sleep(SECONDS)
    return f"{clients} bodies, {cut_off} cut off"


def _forged(frontend: HttpFrontend) -> str:
    """Hold bodies under many addresses while another client asks. Raises RuntimeError if that client is refused."""
    heads = [_HEAD + b"X-Forwarded-For: 198.51.100.%d\r\n" % number for number in range(50)]
    with _open_bodies(frontend, heads, 4 << 20) as cut_off:
        body = encode({"prompt": "x", "max_tokens": 1})
        answer = frontend.post("/v1/completions", body.rjust(4 << 20))
    if answer.startswith(REFUSED):
        raise RuntimeError(f"bodies from forged addresses: another client was {answer}")
    return f"{len(heads)} bodies, {cut_off} cut off"


@contextmanager
def _open_bodies(frontend: HttpFrontend, heads: list[bytes], size: int) -> Iterator[int]:
    """Send all of a body but the last byte after each head; yield the number of bodies that the server cut off."""
    cut_off = 0
    with ExitStack() as connections:
        for head in heads:
            connection = connections.enter_context(_connect(frontend))
            try:
                connection.sendall(_request(b" " * (size - 1), size, head))
            except OSError:  # refused before its end
                cut_off += 1
        yield cut_off


def _cached_prompt(frontend: HttpFrontend) -> str:
    """Ask as another client did before. Raises RuntimeError if the answer tells so."""
    prompt = [randrange(3, 200) for _ in range(130)]
    cached = []
    with _ONE_AT_A_TIME:
        for source in ("127.0.0.1", ATTACKER, ATTACKER):
            body = {"prompt": prompt, "max_tokens": 1}
            usage = json.loads(post(frontend.port, "/v1/completions", body, source))["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    if cached[1]:
        raise RuntimeError(f"{cached[1]} tokens that another client sent were cached")
    return f"another client's: {cached[1]} tokens cached, one's own: {cached[2]}"


def _slow_reader(frontend: HttpFrontend) -> str:
    end, received = time.perf_counter() + SECONDS, 0
    with _connect(frontend) as connection:
        connection.sendall(_request(encode(_ENDLESS)))
        while time.perf_counter() < end:
            received += len(connection.recv(1))
            time.sleep(0.1)
    return f"{received} bytes"

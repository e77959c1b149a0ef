"""Clients that speak HTTP badly, over real sockets: each is bounded, and its end is noticed."""

import fcntl
import http.client
import json
import signal
import socket
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.requests.round import Round
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.framing import MIN_CHUNK, SMALL_CHUNKS
from tests.openai.client import Served, endless, post_head
from tests.openai.conftest import serving
from tests.openai.test_connections import connected, port_of
from tests.openai.test_leaving import cancelled
from tests.openai.test_stopping import recorded_log
from tests.waiting import PATIENCE_S, eventually

WRITE_S = 2.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
CHUNKED = post_head(None)


@pytest.fixture(scope="module")
def locked(demo_bundle: Path) -> Iterator[Served]:
    config = ServerConfig(port=0, api_key="key", max_body=1 << 20, write_timeout_s=WRITE_S, grace_s=10)
    with serving(demo_bundle, config, RuntimeOptions(threads=1)) as running:
        yield running


def response_of(connection: socket.socket) -> tuple[int, str, str | None]:
    """Status, body, and the header Connection of the next response."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read().decode(), response.headers["connection"]


def chunks(size: int, number: int) -> bytes:
    return (b"%x\r\n" % size + b" " * size + b"\r\n") * number


def test_a_body_of_tiny_chunks_is_cut_off(served: Served) -> None:
    with connected(served) as connection:
        connection.sendall(CHUNKED + chunks(1, SMALL_CHUNKS + MIN_CHUNK))
        status, body, _ = response_of(connection)
        assert (status, f"a body may have {SMALL_CHUNKS} chunks" in body) == (400, True)
        assert connection.recv(1) == b""


@pytest.mark.parametrize(("size", "number"), [(1, SMALL_CHUNKS - 1), (2 * MIN_CHUNK, 3 * SMALL_CHUNKS)])
def test_a_body_of_few_or_larger_chunks_is_read(served: Served, size: int, number: int) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
    with connected(served) as connection:
        connection.sendall(CHUNKED + chunks(size, number) + b"%x\r\n" % len(body) + body + b"\r\n0\r\n\r\n")
        assert response_of(connection)[0] == 200


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"Content-Length: 100000\r\n\r\n", 401),
        (b"Transfer-Encoding: chunked\r\n\r\n", 401),
        (b"Content-Length: 100000\r\nExpect: 100-continue\r\n\r\n", 401),
        (b"Authorization: Bearer key\r\nContent-Length: 2000000\r\n\r\n", 413),
    ],
)
def test_a_connection_ends_after_a_body_that_was_not_read(locked: Served, head: bytes, status: int) -> None:
    with connected(locked) as connection:
        connection.sendall(HEAD + head)
        assert response_of(connection)[::2] == (status, "close")


def test_an_unread_body_of_tiny_chunks_ends_the_connection(locked: Served) -> None:
    with connected(locked) as connection:
        connection.sendall(CHUNKED)
        assert response_of(connection)[0] == 401
        connection.sendall(chunks(1, SMALL_CHUNKS + MIN_CHUNK))
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "head",
    [
        HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n",
        HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n",
    ],
    ids=["both", "HTTP/1.0"],
)
def test_a_body_has_one_length(served: Served, head: bytes) -> None:
    with connected(served) as connection:
        connection.sendall(head + b"2\r\n{}\r\n0\r\n\r\n")
        status, body, _ = response_of(connection)
        assert (status, "one of Transfer-Encoding" in body) == (400, True)
        assert connection.recv(1) == b""


@contextmanager
def held_round(served: Served, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let the next request run to its fourth round, which ends with the block. The event says that it is there."""
    score, rounds = served.llm.loop.target.score, count(1)
    reached, release = threading.Event(), threading.Event()

    def hold(plan: Round) -> None:
        if next(rounds) == 4:
            reached.set()
            release.wait(PATIENCE_S)
        score(plan)

    monkeypatch.setattr(served.llm.loop.target, "score", hold)
    try:
        yield reached
    finally:
        release.set()


@pytest.mark.parametrize("late", [b"x", b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 1000], ids=["byte", "requests"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_after_late_bytes_is_cancelled(
    served: Served, monkeypatch: pytest.MonkeyPatch, late: bytes, stream: bool
) -> None:
    before, kept = cancelled(served), served.metrics()["tandemrt_kept_total"]
    body = json.dumps(endless(stream=stream, num_draft_tokens=0)).encode()
    with held_round(served, monkeypatch) as reached:
        with connected(served) as connection:
            connection.sendall(post_head(len(body)) + body)
            assert reached.wait(PATIENCE_S)
            connection.sendall(late)
            connection.shutdown(socket.SHUT_RDWR)  # close alone would not suffice: a forked process may hold a copy
        assert eventually(lambda: not served.server.server_state.tasks)
    assert eventually(lambda: served.llm.running == 0)
    assert cancelled(served) == before + 1
    assert served.metrics()["tandemrt_kept_total"] - kept < 490


@contextmanager
def unread_responses(served: Served) -> Iterator[None]:
    """Request until the socket is full of responses that the client does not read."""
    with socket.socket() as silent:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        silent.connect(("127.0.0.1", port_of(served)))
        silent.settimeout(0.5)
        request = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer key\r\n\r\n"
        with pytest.raises(TimeoutError):
            silent.sendall(request * 1_000_000)
        yield


def test_few_bytes_that_a_client_does_not_read_wait_in_the_kernel(served: Served) -> None:
    with unread_responses(served):
        for connection in served.server.server_state.connections:
            unsent = fcntl.ioctl(connection.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            assert int.from_bytes(unsent, sys.byteorder) < 256 << 10


def test_a_client_that_does_not_read_is_disconnected(locked: Served) -> None:
    with recorded_log() as records, unread_responses(locked):
        assert eventually(lambda: not locked.server.server_state.connections)
    assert [record for record in records if record.exc_info] == []


def test_a_client_that_does_not_read_does_not_keep_a_server_without_a_grace_period(demo_bundle: Path) -> None:
    config = ServerConfig(port=0, write_timeout_s=WRITE_S)
    with (
        serving(demo_bundle, config, RuntimeOptions(threads=1)) as running,
        recorded_log() as records,
        unread_responses(running),
    ):
        for _ in range(2):
            running.server.handle_exit(signal.SIGTERM, None)
        assert eventually(lambda: not running.server.server_state.connections)
    assert [record for record in records if record.exc_info] == []

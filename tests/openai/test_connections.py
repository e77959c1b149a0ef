"""Connections and bodies beyond the limits are refused with an answer, and give back what they held."""

import gc
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.requests.prompt import Chat
from tandemrt.runtime.servers.http import connections
from tandemrt.runtime.servers.http.app import create_app
from tandemrt.runtime.servers.http.body import BodyBudget
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.connections import MAX_REFUSED, client_network
from tandemrt.runtime.servers.openai.errors import Overloaded
from tandemrt.runtime.servers.openai.served_models import Models
from tandemrt.runtime.workers.clients import Client
from tests.openai.client import Served, post_head
from tests.openai.conftest import serving
from tests.openai.test_stopping import held_engine, recorded_log
from tests.waiting import PATIENCE_S, eventually

BODY = 1 << 20
HEADER_S = 1.0  # long enough for a test that is delayed between two calls
PART = 700_000  # bytes: one fits the half of the budget that an address gets, two do not


@pytest.fixture(scope="module")
def limited(demo_bundle: Path) -> Iterator[Served]:
    door = ServerConfig(
        port=0, max_body=BODY, max_bodies=2 * BODY, max_connections=6, max_connections_per_address=3, grace_s=10
    )
    with serving(demo_bundle, door, RuntimeOptions(threads=1)) as running:
        yield running


@pytest.fixture(scope="module")
def impatient(demo_bundle: Path) -> Iterator[Served]:
    door = ServerConfig(port=0, header_timeout_s=HEADER_S, body_timeout_s=3 * HEADER_S, grace_s=10)
    with serving(demo_bundle, door, RuntimeOptions(threads=1)) as running:
        yield running


def port_of(served: Served) -> int:
    port = urlsplit(served.url).port
    assert port is not None
    return port


def connected(served: Served, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(served)), PATIENCE_S, (source, 0))


def ask(served: Served, path: str, source: str, body: bytes | None = None) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON and headers of an answer to a client at ``source``."""
    connection = http.client.HTTPConnection("127.0.0.1", port_of(served), PATIENCE_S, (source, 0))
    try:
        connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read()), {name.lower(): value for name, value in answer.headers.items()}
    finally:
        connection.close()


def begun_body(served: Served, source: str, size: int, announced: int = BODY) -> socket.socket:
    """Send ``size`` bytes of a longer body."""
    connection = connected(served, source)
    head = post_head(announced)
    connection.sendall(head + b" " * size)
    return connection


def answer_of(connection: socket.socket) -> tuple[int, Any]:
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, json.loads(answer.read())


def test_silent_connections_do_not_close_the_server(limited: Served) -> None:
    with ExitStack() as stack:
        for source in ("127.0.0.2", "127.0.0.2", "127.0.0.2"):
            stack.enter_context(connected(limited, source))
        status, body, headers = ask(limited, "/v1/models", "127.0.0.2")
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
        assert "has 3 connections from this address (--max-connections-per-address)" in body["error"]["message"]
        assert headers["connection"] == "close"
        assert ask(limited, "/health", "127.0.0.2")[0] == 200
        assert eventually(lambda: ask(limited, "/v1/models", "127.0.0.3")[0] == 200)
        for _ in range(3):
            stack.enter_context(connected(limited, "127.0.0.3"))
        status, body, _ = ask(limited, "/v1/models", "127.0.0.4")
        assert (status, "has 6 connections (--max-connections)" in body["error"]["message"]) == (503, True)
        for _ in range(MAX_REFUSED + 10):
            stack.enter_context(connected(limited, "127.0.0.2"))
        assert ask(limited, "/health", "127.0.0.4")[0] == 200
    assert eventually(lambda: ask(limited, "/v1/models", "127.0.0.2")[0] == 200)
    assert eventually(lambda: ask(limited, "/v1/models", "127.0.0.4")[0] == 200)


def test_a_flood_of_connections_leaves_turns_to_other_events(served: Served) -> None:
    loop, server = served.server.servers[0].get_loop(), served.server
    numbers: list[int] = []
    done = threading.Event()

    def count() -> None:
        numbers.append(len(server.server_state.connections))
        if numbers[-1] - numbers[0] < 100:
            loop.call_soon(count)
        else:
            done.set()

    with ExitStack() as stack:

        def flood() -> None:  # the system takes the connections while the loop stands still
            for _ in range(100):
                stack.enter_context(connected(served, "127.0.0.9"))
            count()

        loop.call_soon_threadsafe(flood)
        assert done.wait(PATIENCE_S)
    assert max(after - before for before, after in pairwise(numbers)) <= 20


def held_bytes(served: Served) -> int:
    """The bytes of request bodies that the server holds."""
    app: Any = served.server.config.app
    while not isinstance(app, FastAPI):
        app = app._app
    return int(app.state.bodies.total)


def test_bodies_beyond_the_budget_are_refused(limited: Served) -> None:
    with begun_body(limited, "127.0.0.5", PART):
        assert eventually(lambda: held_bytes(limited) == PART)
        status, body, headers = ask(limited, "/v1/completions", "127.0.0.5", b" " * PART)
        assert (status, body["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
        assert (
            f"hold {BODY} bytes of request bodies and unread answers per client at a time (--max-bodies)"
            in body["error"]["message"]
        )
        assert ask(limited, "/v1/completions", "127.0.0.6", b" " * PART)[0] == 400
        assert eventually(lambda: held_bytes(limited) == PART)
        with begun_body(limited, "127.0.0.6", PART):
            assert eventually(lambda: held_bytes(limited) == 2 * PART)
            assert ask(limited, "/v1/completions", "127.0.0.7", b" " * PART)[0] == 503
    assert eventually(lambda: held_bytes(limited) == 0)
    assert ask(limited, "/v1/completions", "127.0.0.5", b" " * PART)[0] == 400


UNREAD = [{"role": "user", "content": "x", "name": "é" * 10_000}]  # the demo's chat template reads no name


@contextmanager
def waiting_request(served: Served, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Let a request wait for a held engine while the block runs; then it must succeed, and no body be held."""
    sent = json.dumps(body, ensure_ascii=False).encode()
    head = post_head(len(sent), path)
    prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
    with ExitStack() as stack:
        connection = stack.enter_context(connected(served, "127.0.0.8"))
        with held_engine(served):
            before = served.llm.waiting + served.llm.running
            connection.sendall(head + sent)
            assert eventually(lambda: served.llm.waiting + served.llm.running == before + prompts)
            yield
        answer = http.client.HTTPResponse(connection)
        answer.begin()
        assert (answer.status, bool(answer.read())) == (200, True)
    assert eventually(lambda: held_bytes(served) == 0)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": UNREAD}),
        ("/v1/completions", {"prompt": ["é" * 200] * 2}),
        ("/v1/completions", {"prompt": [[7] * 400, [7] * 400]}),
    ],
)
def test_a_waiting_request_keeps_no_prompt(limited: Served, path: str, body: dict[str, Any], stream: bool) -> None:
    with waiting_request(limited, path, {**body, "max_tokens": 1, "stream": stream}):
        assert eventually(lambda: 0 < held_bytes(limited) < 1000)
        gc.collect()
        assert not [chat for chat in gc.get_objects() if type(chat) is Chat and chat.messages[0].get("name")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "metadata": {f"key{at}": "v" * 500 for at in range(16)}}),
        ("/v1/responses", {"input": "x", "instructions": "v" * 300}),
        ("/v1/completions", {"prompt": "v" * 300, "echo": True}),
    ],
)
def test_fields_that_an_answer_repeats_count_until_its_end(
    limited: Served, path: str, body: dict[str, Any], stream: bool
) -> None:
    most = "max_output_tokens" if "input" in body else "max_tokens"
    with waiting_request(limited, path, {**body, most: 1, "stream": stream}):
        time.sleep(0.1)  # for the server to give back too much
        assert held_bytes(limited) >= json.dumps(body).count("v")


def test_an_abandoned_stream_holds_no_body(limited: Served) -> None:
    sent = json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "stream": True}).encode()
    with connected(limited, "127.0.0.8") as connection:
        connection.sendall(post_head(len(sent), "/v1/chat/completions") + sent)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    assert eventually(lambda: held_bytes(limited) == 0)


def test_a_body_must_be_smaller_than_half_of_all() -> None:
    assert ServerConfig(max_body=10).bodies_limit == 160
    assert ServerConfig(max_body=10, max_bodies=20).bodies_limit == 20
    with pytest.raises(BadRequest, match=r"max_bodies: must be at least twice max_body \(10\), .* received 19;"):
        ServerConfig(max_body=10, max_bodies=19)


def test_an_address_gets_a_quarter_of_the_connections() -> None:
    assert ServerConfig(max_connections=9).address_limit == 2
    assert ServerConfig(max_connections=1).address_limit == 1
    for most in (0, 10):
        with pytest.raises(BadRequest, match=r"max_connections_per_address: must be 1 to max_connections \(9\)"):
            ServerConfig(max_connections=9, max_connections_per_address=most)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 8), st.booleans()), max_size=40))
def test_a_budget_holds_what_is_open_within_its_limits(steps: list[tuple[str, int, bool]]) -> None:
    budget = BodyBudget(10)
    open_shares: list[tuple[str, int, ExitStack]] = []
    for address, size, close in steps:
        if close and open_shares:
            open_shares.pop(0)[2].close()
            continue
        stack = ExitStack()
        share = stack.enter_context(budget.share(address))
        own, every = (
            sum(each for name, each, _ in open_shares if name == address),
            sum(each for _, each, _ in open_shares),
        )
        if own + size > 5 or every + size > 10:
            with pytest.raises(Overloaded):
                share.take(size)
            stack.close()
        else:
            share.take(size)
            open_shares.append((address, size, stack))
        assert budget.total == sum(each for _, each, _ in open_shares)
    for _, _, stack in open_shares:
        stack.close()
    assert budget.total == 0


def test_a_silent_connection_is_closed(impatient: Served) -> None:
    with connected(impatient) as silent:
        assert silent.recv(100) == b""


@pytest.mark.parametrize(("header_s", "refused_s"), [(60.0, HEADER_S), (HEADER_S, 60.0)])
def test_a_refused_connection_has_the_smaller_of_two_times(
    demo_bundle: Path, monkeypatch: pytest.MonkeyPatch, header_s: float, refused_s: float
) -> None:
    monkeypatch.setattr(connections, "REFUSED_TIMEOUT_S", refused_s)
    config = ServerConfig(port=0, max_connections=4, max_connections_per_address=1, header_timeout_s=header_s)
    with serving(demo_bundle, config, RuntimeOptions(threads=1)) as running, connected(running), ExitStack() as stack:
        assert eventually(lambda: len(running.server.server_state.connections) == 1)
        refused = stack.enter_context(connected(running))
        refused.settimeout(30.0)
        assert refused.recv(100) == b""


def test_a_late_head_is_answered_with_408(impatient: Served) -> None:
    with connected(impatient) as slow:
        slow.sendall(b"POST /v1/comp")
        status, body = answer_of(slow)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        assert "the head of a request must come within 1 seconds" in body["error"]["message"]
        assert slow.recv(100) == b""


def test_the_time_of_a_head_starts_anew_with_each_request(impatient: Served) -> None:
    """The first answer takes longer than a head may."""
    body = b'{"prompt": "x", "max_tokens": 1}'
    first = post_head(len(body)) + body
    with connected(impatient) as connection:
        with held_engine(impatient):
            connection.sendall(first * 3)
            time.sleep(1.5 * HEADER_S)
        for _ in range(3):
            assert answer_of(connection)[0] == 200
        connection.sendall(b"GET /v1/mod")
        assert answer_of(connection)[0] == 408


def test_a_slow_body_is_answered_with_408(impatient: Served) -> None:
    with begun_body(impatient, "127.0.0.1", 1) as slow:
        status, body = answer_of(slow)
        assert (status, body["error"]["code"]) == (408, "request_timeout")
        message = "within 3 seconds, after 1 at 16384 bytes per second or faster, received 1 bytes"
        assert message in body["error"]["message"]


def test_bytes_that_are_no_http_get_a_json_error(impatient: Served) -> None:
    with connected(impatient) as connection:
        connection.sendall(b"\x16\x03\x01\x02\x00\x01\r\n\r\n")
        status, body = answer_of(connection)
        assert (status, body["error"]["type"]) == (400, "invalid_request_error")


def test_broken_and_abandoned_bodies_leave_no_traceback(limited: Served) -> None:
    head = post_head(None)
    with recorded_log() as records:
        with connected(limited, "127.0.0.9") as broken:
            broken.sendall(head + b"5\r\nhello\r\nno number\r\n")
            assert answer_of(broken)[0] == 400
        begun_body(limited, "127.0.0.9", 10).close()
        assert eventually(lambda: not limited.server.server_state.tasks)
    assert [record for record in records if record.exc_info] == []


@pytest.mark.parametrize(
    ("host", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_ipv6_clients_are_counted_by_network(host: str, network: str) -> None:
    assert client_network(host) == network


def test_addresses_of_one_ipv6_network_are_one_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, clients = served.llm.submit, []

    def spy(*arguments: Any, client: Client, **more: Any) -> Any:
        clients.append(client)
        return submit(*arguments, client=client, **more)

    monkeypatch.setattr(served.llm, "submit", spy)
    app = create_app(Models({"demo": served.llm}, 0), ServerConfig())
    body = {"prompt": "Hello", "max_tokens": 1, "user": "me"}
    for host in ("2001:db8:1:2::3", "2001:db8:1:2:4::", "192.0.2.7"):
        with TestClient(app, client=(host, 1)) as http:
            assert http.post("/v1/completions", json=body).status_code == 200
    ipv6 = Client("2001:db8:1:2::/64", "me")
    assert clients == [ipv6, ipv6, Client("192.0.2.7", "me")]


def test_an_unexpected_error_is_answered_as_json(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(served.llm, "submit", fails)
    app = create_app(Models({"demo": served.llm}, 0), ServerConfig())
    with TestClient(app, raise_server_exceptions=False) as http:
        answer = http.post("/v1/completions", json={"prompt": "Hello"})
    error = {"message": "LookupError: a bug", "type": "server_error", "param": None, "code": "internal_error"}
    assert (answer.status_code, answer.json()) == (500, {"error": error})


def test_the_limit_of_open_files_bounds_connections() -> None:
    program = (
        "import resource; from tandemrt.runtime.servers.http.connections import allow_connections as allow\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (400, 1000))\n"
        "print(allow(100), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "print(allow(None), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
        "allow(681)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "100 420\n680 1000\n"
    assert "max_connections: the limit of open files (1000) allows 680, received 681" in done.stderr

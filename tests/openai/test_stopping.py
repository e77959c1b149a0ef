"""A server that stops before its requests have finished: each of them gets an answer."""

import http.client
import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tandemrt import SamplingParams, StreamOutput
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.openai.client import Served, endless, events
from tests.openai.conftest import serving
from tests.waiting import PATIENCE_S, eventually, receive_interrupts

CANCELLED = "the request was cancelled: the server is closing"


@contextmanager
def held_engine(served: Served) -> Iterator[None]:
    """Stop the engine loop while the block runs, so that no request finishes."""
    holding, release = threading.Event(), threading.Event()

    def hold(_: StreamOutput) -> None:
        holding.set()
        release.wait(PATIENCE_S)

    try:
        served.llm.submit("x", SamplingParams(max_tokens=1), hold)
        assert holding.wait(PATIENCE_S)
        yield
    finally:
        release.set()


@contextmanager
def recorded_log() -> Iterator[list[logging.LogRecord]]:
    """Collect uvicorn's records, which do not reach the root logger."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("uvicorn.error").addHandler(handler)
    try:
        yield records
    finally:
        logging.getLogger("uvicorn.error").removeHandler(handler)


@pytest.mark.parametrize(("grace_s", "signals"), [(0, 1), (None, 2)], ids=["grace", "second SIGINT"])
def test_requests_past_the_grace_period_are_answered(demo_bundle: Path, grace_s: int | None, signals: int) -> None:
    with (
        serving(demo_bundle, ServerConfig(port=0, grace_s=grace_s), RuntimeOptions(threads=1)) as served,
        recorded_log() as records,
        ExitStack() as stack,
    ):
        stream = served.send("/v1/completions", endless(stream=True, num_draft_tokens=0))  # lasts longest
        chunks = events(stream.getresponse())
        assert next(chunks)["choices"]
        named = {path: _begun(served, path) for path in ("/v1/responses", "/v1/messages")}
        stack.enter_context(held_engine(served))
        whole = [served.send("/v1/completions", endless(stream=kind)) for kind in (False, False, True)]
        assert eventually(lambda: served.llm.waiting + served.llm.running >= 6)
        unfinished = served.connect()
        unfinished.putrequest("POST", "/v1/completions")
        unfinished.putheader("Content-Type", "application/json")
        unfinished.putheader("Content-Length", "99")
        unfinished.endheaders(b"{")
        assert eventually(lambda: len(served.server.server_state.tasks) == 7)
        for _ in range(signals):
            served.server.handle_exit(signal.SIGINT, None)
        for connection in (*whole, unfinished):
            answer = connection.getresponse()
            error = json.loads(answer.read())["error"]
            assert (answer.status, error["code"], error["message"]) == (503, "closed", CANCELLED)
            connection.close()
        *_, last = chunks  # ends with [DONE]
        assert last["error"]["message"] == CANCELLED
        stream.close()
        for path, (connection, answer) in named.items():
            name, data = answer.read().decode().removesuffix("\n\n").split("\n\n")[-1].split("\n")
            error = json.loads(data.removeprefix("data: "))["error"]
            assert (name, error["message"]) == ("event: error", CANCELLED)
            assert error["type"] == {"/v1/responses": "server_error", "/v1/messages": "overloaded_error"}[path]
            connection.close()
        assert [record for record in records if record.exc_info] == []


def test_a_client_that_reads_nothing_does_not_keep_the_server(demo_bundle: Path) -> None:
    """Its answer does not fit the socket: it is dropped after the time for last answers."""
    with (
        serving(demo_bundle, ServerConfig(port=0, grace_s=0), RuntimeOptions(threads=1)) as served,
        recorded_log() as records,
    ):
        parts = urlsplit(served.url)
        assert parts.hostname is not None
        with socket.socket() as silent:
            silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            silent.connect((parts.hostname, parts.port))
            head = b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
            silent.settimeout(1.0)
            with pytest.raises(TimeoutError):  # the socket is full: the server waits for its reader
                silent.sendall(head * 1_000_000)
            served.server.handle_exit(signal.SIGTERM, None)
            assert eventually(lambda: not served.server.server_state.connections)
        assert [record for record in records if record.exc_info] == []


def test_an_interrupted_server_leaves_without_a_traceback(demo_bundle: Path, tmp_path: Path) -> None:
    """The second SIGINT comes when the first one has closed the port."""
    command = [sys.executable, "-c", "from tandemrt.cli import main; main()", "serve", f"mine={demo_bundle}"]
    command += ["--port", "0", "--threads", "1", "--trace", str(tmp_path / "trace.json")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=receive_interrupts
    ) as process:
        try:
            assert process.stdout is not None
            address = urlsplit(process.stdout.readline().split()[-1])
            body = json.dumps({"prompt": "x", "ignore_eos": True, "n": 30})
            sent = []
            for _ in range(8):
                connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=PATIENCE_S)
                connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
                sent.append(connection)
            assert eventually(lambda: _waiting(address.port) > 100)
            process.send_signal(signal.SIGINT)
            assert eventually(lambda: not _accepts(address.port))
            process.send_signal(signal.SIGINT)
            assert {_status(connection) for connection in sent} <= {200, 503}
            _, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert "Traceback" not in errors
    assert "INFO 127.0.0.1 POST '/v1/completions' " in errors
    assert "INFO shutting down: " in errors
    assert "INFO shut down after " in errors
    assert "/metrics" not in errors
    assert process.returncode == 0
    assert (tmp_path / "trace.json").exists()


def _begun(served: Served, path: str) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    """A stream whose first event has arrived."""
    asked = [{"role": "user", "content": "Two boxes."}]
    prompt = {"input": asked} if path == "/v1/responses" else {"messages": asked}
    connection = served.send(path, {**prompt, "ignore_eos": True, "stream": True})
    answer = connection.getresponse()
    assert answer.readline().startswith(b"event: ")
    return connection, answer


def _accepts(port: int | None) -> bool:
    assert port is not None
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _status(connection: http.client.HTTPConnection) -> int:
    try:
        return connection.getresponse().status
    finally:
        connection.close()


def _waiting(port: int | None) -> float:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    families = text_string_to_metric_families(connection.getresponse().read().decode())
    connection.close()
    return sum(s.value for family in families if family.name == "tandemrt_requests_waiting" for s in family.samples)


def test_the_end_of_a_server_collects_no_objects(demo_bundle: Path) -> None:
    """The interpreter would collect all objects of the models at its exit, for seconds on a busy machine."""
    print_frozen = "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count(), gc.get_count()[0]))"
    command = [sys.executable, "-c", f"{print_frozen}; from tandemrt.cli import main; main()", "serve", demo_bundle]
    with subprocess.Popen([*command, "--port", "0", "--threads", "1"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving ")
        process.terminate()
        frozen, others = map(int, process.stdout.read().split())
    assert process.returncode == 0
    assert frozen > 50_000
    assert others < 100

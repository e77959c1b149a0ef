"""Disconnected clients, slow readers, and a server that stops."""

import http.client
import re
import signal
import socket
import subprocess
import sys
import threading
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tandemrt.runtime.requests.round import Round
from tests.openai.client import Served, endless, events
from tests.waiting import PATIENCE_S, eventually


def cancelled(served: Served) -> float:
    return served.metrics().get("tandemrt_finished_total cancelled", 0.0)


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnected_client_is_cancelled(served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """The loop stands still from the fourth round until the client is gone, on a machine of any speed."""
    before, kept = cancelled(served), served.metrics()["tandemrt_kept_total"]
    score, rounds = served.llm.loop.target.score, count(1)
    seen, release = threading.Event(), threading.Event()

    def hold(round_: Round) -> None:
        if next(rounds) == 4:
            seen.set()
            release.wait(PATIENCE_S)
        score(round_)

    monkeypatch.setattr(served.llm.loop.target, "score", hold)
    connection = served.send("/v1/completions", endless(stream=stream, num_draft_tokens=0))
    assert seen.wait(PATIENCE_S)
    if stream:
        assert next(events(connection.getresponse()))["choices"]
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    release.set()
    assert eventually(lambda: served.llm.running == 0)
    assert cancelled(served) == before + 1
    assert served.metrics()["tandemrt_kept_total"] - kept < 490


def test_a_slow_reader_does_not_delay_others(served: Served) -> None:
    slow = [served.send("/v1/completions", endless(stream=True)) for _ in range(4)]  # their client does not read
    status, body, _ = served.ask("/v1/completions", endless(max_tokens=50))
    assert (status, body["usage"]["completion_tokens"]) == (200, 50)
    assert eventually(lambda: served.llm.running == 0)
    for connection in slow:
        chunks = list(events(connection.getresponse()))
        connection.close()
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stopping_server_finishes_running_requests(demo_bundle: Path) -> None:
    command = [sys.executable, "-c", "from tandemrt.cli import main; main()", "serve", f"mine={demo_bundle}"]
    command += ["--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert re.fullmatch(r"serving mine at (http://127.0.0.1:\d+/)v1; chat: \1\n", line)
            address = urlsplit(line.split()[-1])
            connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=PATIENCE_S)
            body = b'{"prompt": "x", "stream": true, "ignore_eos": true}'
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            chunks = events(answer)
            assert next(chunks)["model"] == "mine"
            process.send_signal(signal.SIGTERM)
            assert list(chunks)[-1]["choices"][0]["finish_reason"] == "length"
            connection.close()
            process.wait(PATIENCE_S)
        finally:
            process.kill()
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection("127.0.0.1", address.port).connect()

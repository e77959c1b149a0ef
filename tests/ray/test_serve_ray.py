"""Replicas of Ray Serve: answers, cancellation, routing, and what a killed replica and an update lose."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.openai.conftest import serving
from tests.ray.conftest import COMMAND, RayServer, serving_with_ray
from tests.waiting import PATIENCE_S, eventually

COMPLETIONS = "/v1/completions"
LOST = "the replica of this request has ended; send it again"
REQUESTS, CLIENTS = 32, 8


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Update:
    """A server that a second command has updated, and what a client saw meanwhile.

    Attributes:
        names: of the models that answered.
        texts: of its requests, by their number.
    """

    server: RayServer
    names: set[str]
    texts: dict[int, str]


@pytest.fixture(scope="module")
def update(demo_bundle: Path, ray_environment: dict[str, str]) -> Iterator[Update]:
    """One replica serves ``old``, then two serve ``demo``: the second command finds the cluster of the first."""
    port = free_port()
    with serving_with_ray(f"old={demo_bundle}", port, ray_environment, 1) as server:
        update = Update(server, set(), {})
        stop = threading.Event()

        def ask_until_updated() -> None:
            for at in count(0, 2):
                if stop.is_set():
                    return
                status, answer, _ = server.ask(COMPLETIONS, body(at % REQUESTS))
                assert status == 200, answer
                update.names.add(answer["model"])
                update.texts[at] = answer["choices"][0]["text"]

        with ThreadPoolExecutor(1) as client:
            asked = client.submit(ask_until_updated)
            try:
                with serving_with_ray(f"demo={demo_bundle}", port, ray_environment, 2):
                    assert eventually(lambda: "demo" in update.names or asked.done())
                    stop.set()
                    asked.result(PATIENCE_S)
                    yield update
            finally:
                stop.set()
    assert eventually(lambda: not server.processes())


@pytest.fixture(scope="module")
def server(update: Update) -> RayServer:
    return update.server


def body(at: int) -> dict[str, Any]:
    return {"prompt": f"Please send {at}", "seed": at, "max_tokens": 40, "ignore_eos": True, "temperature": 1.0}


def text_of(server: RayServer, at: int) -> str | None:
    """Return the text of a request, of a stream if ``at`` is odd; None: its stream ended with its replica."""
    if at % 2 == 0:
        status, answer, _ = server.ask(COMPLETIONS, body(at))
        assert status == 200, answer
        return str(answer["choices"][0]["text"])
    text = ""
    for event in server.stream(COMPLETIONS, body(at)):
        if "error" in event:
            assert event["error"]["message"] == LOST
            return None
        text += "".join(choice["text"] for choice in event["choices"])
    return text


def send_all(server: RayServer, during: Callable[[], None] = lambda: None) -> dict[int, str | None]:
    """Send REQUESTS requests with CLIENTS clients, run ``during`` when a quarter has its answer, return the texts."""
    texts: dict[int, str | None] = {}
    numbers, lock = iter(range(REQUESTS)), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                at = next(numbers, None)
            if at is None:
                return
            texts[at] = text_of(server, at)

    threads = [threading.Thread(target=run) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(texts) >= REQUESTS // 4)
    during()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    return texts


@pytest.fixture(scope="module")
def expected(demo_bundle: Path) -> dict[int, str]:
    """The texts of ``tandemrt serve`` without Ray."""
    with serving(demo_bundle, ServerConfig(port=0), RuntimeOptions(threads=1)) as one:
        answers = [one.ask(COMPLETIONS, body(at))[1] for at in range(REQUESTS)]
    return {at: answer["choices"][0]["text"] for at, answer in enumerate(answers)}


def test_a_killed_replica_loses_only_the_streams_that_it_had_begun(server: RayServer, expected: dict[int, str]) -> None:
    before = set(server.replicas())

    def kill() -> None:
        # The one with the most processor time is the one with requests.
        pids = server.processes("ray::ServeReplica:tandemrt:Replica")
        assert len(pids) == 2
        busiest = max(pids, key=lambda pid: int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11]))
        os.kill(busiest, signal.SIGKILL)

    texts = send_all(server, kill)
    lost = [at for at, text in texts.items() if text is None]
    assert sorted(texts) == list(range(REQUESTS))
    assert {at: text for at, text in texts.items() if text is not None} == {
        at: text for at, text in expected.items() if at not in lost
    }
    assert len(lost) <= CLIENTS  # each client had one request in flight
    assert eventually(lambda: len(set(server.replicas()) - before) == 1 and len(server.replicas()) == 2)


def test_a_request_without_the_key_is_rejected(server: RayServer) -> None:
    for path, request in ((COMPLETIONS, body(0)), ("/v1/models", None), ("/metrics", None)):
        status, answer, headers = server.ask(path, request, key="guess")
        assert status == 401
        assert "Authorization" in answer["error"]["message"]
        assert headers["www-authenticate"] == "Bearer"


def test_bad_requests_get_the_errors_of_one_server(server: RayServer) -> None:
    status, answer, _ = server.ask(COMPLETIONS, {"prompt": "Hi", "max_tokens": 0})
    assert status == 400
    assert answer["error"]["param"] == "max_tokens"
    assert server.ask(COMPLETIONS, b"{")[0] == 400
    assert server.ask("/v1/nothing", {})[0] == 404
    status, answer, _ = server.ask(COMPLETIONS, {"prompt": "x" * (5 << 20)})
    assert status == 413


def test_a_client_that_disconnects_cancels_its_request(server: RayServer) -> None:
    def total(name: str) -> float:
        return sum(value for key, value in server.metrics().items() if key.startswith(name))

    cancelled = total("tandemrt_finished_total cancelled")
    stream = server.stream(COMPLETIONS, body(1) | {"max_tokens": 200})
    next(stream)
    stream.close()
    assert eventually(lambda: total("tandemrt_finished_total cancelled") == cancelled + 1)
    assert total("tandemrt_requests_running") == 0


def test_requests_with_the_same_beginning_go_to_one_replica(server: RayServer) -> None:
    def finished() -> Counter[str]:
        name = "tandemrt_finished_total length "
        metrics = server.metrics().items()
        return Counter({key.removeprefix(name): int(value) for key, value in metrics if key.startswith(name)})

    def send(messages: list[dict[str, str]]) -> None:
        assert server.ask("/v1/chat/completions", {"messages": messages, "max_tokens": 1})[0] == 200

    assert eventually(lambda: len(server.replicas()) == 2)
    before = finished()
    for at in range(32):
        send([{"role": "user", "content": f"Order {at}"}])
    after = finished()
    assert len(after - before) == 2
    for at in range(2):
        before, messages = after, [{"role": "user", "content": f"Order {at}"}]
        for _ in range(3):  # turns
            send(messages)
            messages += [{"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And more?"}]
        after = finished()
        assert [*(after - before).values()] == [3]


def test_a_batch_on_the_cluster_has_the_answers_of_one_server(
    server: RayServer, demo_bundle: Path, expected: dict[int, str], tmp_path: Path
) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out"
    lines = [{"custom_id": str(at), "method": "POST", "url": COMPLETIONS, "body": body(at)} for at in range(REQUESTS)]
    lines.append(lines[0] | {"custom_id": "bad", "body": {"prompt": "Hi", "max_tokens": 0}})
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = [sys.executable, "-c", COMMAND, "batch", f"demo={demo_bundle}", file, "--out", out, "--ray", "--ordered"]
    done = subprocess.run(command, env=server.environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert f"{REQUESTS} answers and 1 errors" in done.stdout, done.stderr
    answers = [json.loads(line) for line in (out / "output.jsonl").read_text().splitlines()]
    assert [answer["custom_id"] for answer in answers] == [str(at) for at in range(REQUESTS)]
    texts = {int(answer["custom_id"]): answer["response"]["body"]["choices"][0]["text"] for answer in answers}
    assert texts == expected
    assert len(server.replicas()) == 2  # those of the server


def test_an_update_to_another_bundle_refuses_no_request(update: Update, expected: dict[int, str]) -> None:
    assert update.names == {"old", "demo"}
    assert all(text == expected[at % REQUESTS] for at, text in update.texts.items())

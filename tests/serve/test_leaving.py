"""Clients that cancel or disconnect, and models that are unloaded."""

import http.client
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.export.triton.repository import write_model
from tests.serve.client import Client, GrpcStream, events
from tests.serve.prompts import endless
from tests.waiting import PATIENCE_S, eventually
from tools.serve import TritonServer

CANCELLED = 'tandemrt_finished_total{reason="cancelled"}'


def test_a_cancelled_grpc_request_ends_before_its_maximum_length(demo: Client) -> None:
    """tests/engine/test_rounds.py counts the rounds until the end."""
    before = demo.metrics()
    stream = GrpcStream(demo)
    stream.send(**endless(stream=True, num_draft_tokens=0))
    stream.next()
    stream.cancel()
    assert eventually(lambda: demo.counted(before).get(CANCELLED) == 1)
    assert demo.counted(before)["tandemrt_kept_total"] < 500


def test_a_cancelled_grpc_request_without_a_stream_ends(demo: Client) -> None:
    before = demo.metrics()
    stream = GrpcStream(demo)
    stream.send(**endless(num_draft_tokens=0))
    assert eventually(lambda: demo.metrics()["tandemrt_requests_running"] == 1)
    stream.cancel()
    assert eventually(lambda: demo.counted(before).get(CANCELLED) == 1)
    assert demo.counted(before)["tandemrt_kept_total"] < 500


def test_disconnecting_from_a_stream_cancels_the_request(demo: Client) -> None:
    before = demo.metrics()
    connection = demo.post("generate_stream", endless(stream=True, num_draft_tokens=0))
    assert next(events(connection.getresponse()))["num_output_tokens"] >= 1
    connection.close()
    assert eventually(lambda: demo.counted(before).get(CANCELLED) == 1)
    assert demo.counted(before)["tandemrt_kept_total"] < 500


def test_disconnecting_clients_free_their_resources(demo: Client) -> None:
    """40 clients disconnect after 0 to 4 events. Clients that stay get their complete answers."""
    alone = demo.generate(**endless(max_tokens=50))[1]["text_output"]
    stayed: list[Any] = []
    clients = [threading.Thread(target=_leave, args=(demo, at % 5)) for at in range(40)]
    clients += [
        threading.Thread(target=lambda: stayed.append(demo.generate(**endless(max_tokens=50)))) for _ in range(8)
    ]
    for client in clients:
        client.start()
    for client in clients:
        client.join(PATIENCE_S)
    assert not any(client.is_alive() for client in clients)
    assert [answer["text_output"] for _, answer in stayed] == [alone] * 8
    assert eventually(lambda: _idle(demo))


def test_unloading_completes_running_requests_and_the_model_can_be_loaded_again(server: TritonServer) -> None:
    """Running requests complete, later ones are rejected, and the server stays up."""
    passing = Client(server, "passing")
    _control(server, "load")
    seen: list[Any] = []
    streams = [
        threading.Thread(target=lambda: seen.append(passing.stream(**endless(num_draft_tokens=0)))) for _ in range(10)
    ]
    for stream in streams:
        stream.start()
    assert eventually(lambda: _arrived(passing) == 10)  # on two instances of 8 slots, distributed by the server
    _control(server, "unload")
    status, answer = passing.generate(text_input="Hello", max_tokens=3)
    assert status != 200, answer
    for stream in streams:
        stream.join(PATIENCE_S)
    assert len(seen) == 10
    for received in seen:
        assert received[-1].get("finish_reason") == "length", received[-1]
    assert eventually(lambda: not _ready(server, "passing"))
    assert eventually(lambda: not passing.metrics())  # the metrics are gone with the model

    _control(server, "load")
    assert passing.generate(text_input="Hello", max_tokens=3)[0] == 200
    assert passing.metrics()["tandemrt_rounds_total"] < 20  # and start from zero
    _control(server, "unload")


def test_a_rewritten_and_reloaded_model_replaces_the_old_one(
    server: TritonServer, repository: Path, demo_bundle: Path
) -> None:
    """The server opens the new model before it closes the old one. Their metrics must not be mixed."""
    passing = Client(server, "passing")
    _control(server, "load")
    assert passing.generate(text_input="Hello", max_tokens=8, ignore_eos=True, num_draft_tokens=2)[0] == 200
    options: dict[str, Any] = {"threads": 1, "overlap": True, "instances": 2}
    for window in (1, 2):
        write_model(Bundle.open(demo_bundle), repository, name="passing", num_draft_tokens=window, **options)
        _control(server, "load")
        assert eventually(lambda: len(_processes(server, "passing")) == 2)  # the old processes are gone
        assert passing.metrics()["tandemrt_kept_total"] == 0
        status, answer = passing.generate(text_input="Hello", max_tokens=8, ignore_eos=True, num_draft_tokens=window)
        assert status == 200, answer
        assert eventually(lambda: passing.metrics()["tandemrt_kept_total"] == 8)
        assert passing.generate(text_input="Hello", num_draft_tokens=window + 1)[0] == 400
    _control(server, "unload")


def test_reloading_under_load_ends_the_old_processes_and_frees_their_memory(
    server: TritonServer,
) -> None:
    passing, enough = Client(server, "passing"), threading.Event()
    _control(server, "load")

    def ask() -> None:
        while not enough.wait(0.02):
            passing.stream(**endless(max_tokens=100))  # some requests arrive while no model is loaded

    clients = [threading.Thread(target=ask) for _ in range(6)]
    for client in clients:
        client.start()
    try:
        for _ in range(2):
            assert eventually(lambda: passing.metrics().get("tandemrt_requests_running", 0) > 0)
            old = _processes(server, "passing")
            _control(server, "unload")
            _control(server, "load")
            assert eventually(lambda old=old: not any(Path(f"/proc/{pid}").exists() for pid in old))
            assert eventually(lambda: len(_processes(server, "passing")) == 2)
    finally:
        enough.set()
    for client in clients:
        client.join(PATIENCE_S)
    _control(server, "unload")


def test_the_server_stops_while_requests_run(repository: Any) -> None:
    with TritonServer(repository, explicit=True, models=("passing",)) as other:
        client = Client(other, "passing")
        answers: list[Any] = []
        request_thread = threading.Thread(
            target=lambda: answers.append(_until_closed(lambda: client.stream(**endless(num_draft_tokens=0))))
        )
        request_thread.start()
        assert eventually(lambda: client.metrics()["tandemrt_requests_running"] == 1)
        assert other.stop(PATIENCE_S) == 0, "it ended by itself, in order"
        request_thread.join(PATIENCE_S)
        assert answers


def _leave(demo: Client, count: int) -> None:
    connection = demo.post("generate_stream", endless(stream=True))
    if count:
        stream = events(connection.getresponse())
        for _ in range(count):
            next(stream)
    connection.close()


def _arrived(client: Client) -> float:
    """Return how many requests the model has received: queued, running or ended."""
    kinds = ("tandemrt_requests_waiting", "tandemrt_requests_running", "tandemrt_finished_total{")
    return sum(value for name, value in client.metrics().items() if name.startswith(kinds))


def _idle(client: Client) -> bool:
    metrics = client.metrics()
    return metrics["tandemrt_requests_running"] == metrics["tandemrt_requests_waiting"] == 0


def _control(server: TritonServer, verb: str) -> None:
    # Over gRPC, because the server's HTTP thread drops responses of other connections while it loads (docs/serving.md).
    with grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}") as control:
        (control.load_model if verb == "load" else control.unload_model)("passing")


def _ready(server: TritonServer, model: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=PATIENCE_S)
    connection.request("GET", f"/v2/models/{model}/ready")
    status = connection.getresponse().status
    connection.close()
    return status == 200


def _processes(server: TritonServer, model: str) -> set[int]:
    """The processes that publish metrics of ``model``."""
    connection = http.client.HTTPConnection("127.0.0.1", server.metrics, timeout=PATIENCE_S)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {int(match[1]) for match in re.finditer(rf'model="{model}".*?process="(\d+)"', text)}


def _until_closed(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (OSError, http.client.HTTPException, InferenceServerException, json.JSONDecodeError) as error:
        return error


@pytest.fixture(autouse=True)
def _quiet(request: pytest.FixtureRequest) -> None:
    """Each test starts without running requests."""
    if "demo" in request.fixturenames:
        assert eventually(lambda: _idle(request.getfixturevalue("demo")))

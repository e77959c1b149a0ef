"""The threads between engine loop and Triton, with a closed sender, a slow server, or disconnected clients."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandemrt.runtime.requests.request import StreamOutput
from tandemrt.runtime.requests.text import TextDelta
from tandemrt.runtime.servers.triton.request_tensors import parse_request
from tandemrt.runtime.servers.triton.send_queue import SendQueue
from tests.waiting import PATIENCE_S, eventually


class Sender:
    """Stand-in for the server's end of one request. Once closed it raises, like the server after a final response."""

    def __init__(self, *, closed: bool) -> None:
        self.closed = closed
        self.sent = threading.Event()
        self.entered = threading.Event()
        self.taken = threading.Event()  # cleared while the server is slow
        self.taken.set()
        self.responses: list[dict[str, Any]] = []

    def send(self, response: Any, flags: int = 0) -> None:  # noqa: ARG002 - the server's signature
        if self.closed:
            raise RuntimeError("Unable to send response. Response sender has been closed.")
        self.entered.set()
        assert self.taken.wait(PATIENCE_S)
        self.responses.append({name: read(values) for name, values in response.get("output_tensors", ())})
        self.sent.set()


def read(values: np.ndarray) -> Any:
    """Return the value of a tensor: a list for tokens, else one value, texts decoded."""
    if values.dtype == np.object_:
        return values[0].decode()
    return values.tolist() if values.dtype == np.int32 else values.tolist()[0]


class Error(Exception):
    INTERNAL = 1


@pytest.fixture
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(  # this module exists only inside a server's process
        InferenceResponse=lambda **parts: parts,
        Tensor=lambda name, values: (name, np.asarray(values)),
        TritonError=Error,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", server)
    for module in ("responses", "response_stream", "disconnects"):
        monkeypatch.delitem(sys.modules, f"tandemrt.runtime.servers.triton.{module}", raising=False)


@pytest.mark.usefixtures("_server")
def test_a_request_whose_error_cannot_be_sent_does_not_block_others() -> None:
    queue, lost, served = SendQueue(), Sender(closed=True), Sender(closed=False)
    for sender in (lost, served):
        streaming(sender, queue).on_output(StreamOutput(TextDelta(text="a"), token_ids=[5]))
    assert served.sent.wait(PATIENCE_S)
    queue.close()


@pytest.mark.usefixtures("_server")
def test_outputs_that_wait_for_a_slow_server_are_sent_as_one_response() -> None:
    queue, slow, other = SendQueue(), Sender(closed=False), Sender(closed=False)
    slow.taken.clear()
    streams = [streaming(slow, queue), streaming(other, queue)]
    streams[0].on_output(StreamOutput(TextDelta(text="-"), token_ids=[0]))
    assert slow.entered.wait(PATIENCE_S)  # the thread of the queue is inside `send` now
    for at in range(100):
        for stream in streams:
            stream.on_output(StreamOutput(TextDelta(reasoning=f"<{at}>", text=f"{at},"), token_ids=[at]))
    slow.taken.set()
    queue.close()
    merged = {
        "text_output": "".join(f"{at}," for at in range(100)),
        "reasoning_output": "".join(f"<{at}>" for at in range(100)),
        "token_ids": list(range(100)),
        "num_output_tokens": 100,
    }
    assert [sent["token_ids"] for sent in slow.responses] == [[0], list(range(100))]
    for sender in (slow, other):
        assert {name: sender.responses[-1][name] for name in merged} == merged
    assert len(other.responses) == 1


@pytest.mark.usefixtures("_server")
def test_a_disconnected_client_is_noticed_at_once_while_many_requests_wait() -> None:
    """One request is active and 300 are idle. The active one is polled in every turn, the idle ones in rotation."""
    from tandemrt.runtime.servers.triton.disconnects import DisconnectMonitor

    all_added, polls = threading.Event(), [0] * 300
    monitor = DisconnectMonitor()
    for at in range(300):
        monitor.add(Polled(polls, at, all_added))  # type: ignore[arg-type]
    gone = Polled(polls, -1, all_added, gone=True)
    monitor.add(gone)  # type: ignore[arg-type]
    all_added.set()
    assert gone.cancelled.wait(PATIENCE_S)
    assert gone.others <= 2 * 8
    gone.done = True
    assert eventually(lambda: min(polls) > 0), "an idle request is never polled"
    monitor.close()


class Polled:
    """Stand-in for a request's stream: idle, or active with a client that is ``gone``."""

    def __init__(self, polls: list[int], at: int, all_added: threading.Event, *, gone: bool = False) -> None:
        self.active, self.done, self.cancelled = gone, False, threading.Event()
        self.others = 0  # polls of others before the first poll of this one
        self._polls, self._at, self._all_added, self._gone = polls, at, all_added, gone

    def client_cancelled(self) -> bool:
        assert self._all_added.wait(PATIENCE_S)
        if self._gone:
            self.others = self.others or sum(self._polls)
        else:
            self._polls[self._at] += 1
        return self._gone

    def cancel(self) -> None:
        self.cancelled.set()


def streaming(sender: Sender, queue: SendQueue) -> Any:
    from tandemrt.runtime.servers.triton.response_stream import ResponseStream

    request = SimpleNamespace(prompt=[1], others=())
    llm: Any = SimpleNamespace(submit=lambda *_, **__: request, cancel=lambda _: None)
    stream = ResponseStream(llm, sender, parse_request({}, {"text_input": "Hello", "stream": True}), queue)
    stream.submit()
    return stream

"""The threads between the loop and the server, when the server takes no more, is slow, or its clients are gone."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandemrt.runtime.requests.outputs import StreamOutput
from tandemrt.runtime.requests.text import Delta
from tests.waiting import PATIENCE_S, eventually


class Sender:
    """The server's end of one request. Closed, it raises, as the server's does once a final response was begun."""

    def __init__(self, *, closed: bool) -> None:
        self.closed = closed
        self.sent = threading.Event()
        self.entered = threading.Event()
        self.taken = threading.Event()  # cleared: the server takes its time
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
    """What a tensor says: lists of tokens as they are, single values alone, texts decoded."""
    if values.dtype == np.object_:
        return values[0].decode()
    return values.tolist() if values.dtype == np.int32 else values.tolist()[0]


class Error(Exception):
    INTERNAL = 1


@pytest.fixture
def _server(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(  # exists only inside a server's process
        InferenceResponse=lambda **parts: parts,
        Tensor=lambda name, values: (name, np.asarray(values)),
        TritonError=Error,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", server)
    for module in ("responses", "watch"):
        monkeypatch.delitem(sys.modules, f"tandemrt.runtime.triton.{module}", raising=False)


@pytest.mark.usefixtures("_server")
def test_a_request_that_cannot_even_be_refused_holds_up_no_other() -> None:
    from tandemrt.runtime.triton.responses import Outbox

    outbox, lost, served = Outbox(), Sender(closed=True), Sender(closed=False)
    for sender in (lost, served):
        streaming(sender, outbox).listen(StreamOutput(Delta(text="a"), token_ids=[5]))
    assert served.sent.wait(PATIENCE_S)
    outbox.close()


@pytest.mark.usefixtures("_server")
def test_what_a_request_says_while_the_server_is_slow_goes_out_as_one_response() -> None:
    from tandemrt.runtime.triton.responses import Outbox

    outbox, slow, other = Outbox(), Sender(closed=False), Sender(closed=False)
    slow.taken.clear()
    replies = [streaming(slow, outbox), streaming(other, outbox)]
    replies[0].listen(StreamOutput(Delta(text="-"), token_ids=[0]))
    assert slow.entered.wait(PATIENCE_S)  # the outbox is in there now
    for at in range(100):
        for reply in replies:
            reply.listen(StreamOutput(Delta(reasoning=f"<{at}>", text=f"{at},"), token_ids=[at]))
    slow.taken.set()
    outbox.close()
    whole = {
        "text_output": "".join(f"{at}," for at in range(100)),
        "reasoning_output": "".join(f"<{at}>" for at in range(100)),
        "token_ids": list(range(100)),
        "num_output_tokens": 100,
    }
    assert [sent["token_ids"] for sent in slow.responses] == [[0], list(range(100))]
    for sender in (slow, other):
        assert {name: sender.responses[-1][name] for name in whole} == whole
    assert len(other.responses) == 1


@pytest.mark.usefixtures("_server")
def test_a_client_that_is_gone_is_noticed_at_once_however_many_wait() -> None:
    """One request moves, 300 wait: it is asked about at every turn, of those a few, and all of them come to it."""
    from tandemrt.runtime.triton.watch import Watch

    everybody, cancelled, asked = threading.Event(), threading.Event(), [0] * 300
    watch = Watch(SimpleNamespace(cancel=lambda _: cancelled.set()))  # type: ignore[arg-type]
    for at in range(300):
        watch.add(Asked(asked, at, everybody))  # type: ignore[arg-type]
    gone = Asked(asked, -1, everybody, gone=True)
    watch.add(gone)  # type: ignore[arg-type]
    everybody.set()
    assert cancelled.wait(PATIENCE_S)
    assert gone.others <= 2 * 8
    gone.done = True
    assert eventually(lambda: min(asked) > 0), "somebody who waits is never asked about"
    watch.close()


class Asked:
    """A request that ``moved``, in a slot, whose client is ``gone``, or one that waits."""

    def __init__(self, asked: list[int], at: int, everybody: threading.Event, *, gone: bool = False) -> None:
        self.moved, self.done, self.request = gone, False, None
        self.others = 0  # questions about others before the first about this one
        self._asked, self._at, self._everybody, self._gone = asked, at, everybody, gone

    def abandoned(self) -> bool:
        assert self._everybody.wait(PATIENCE_S)
        if self._gone:
            self.others = self.others or sum(self._asked)
        else:
            self._asked[self._at] += 1
        return self._gone


def streaming(sender: Sender, outbox: Any) -> Any:
    from tandemrt.runtime.triton.requests import read_request
    from tandemrt.runtime.triton.responses import Reply

    request = SimpleNamespace(prompt=[1], cancel=lambda: None, others=())
    llm: Any = SimpleNamespace(submit=lambda *_, **__: request)
    reply = Reply(sender, read_request({}, {"text_input": "Hello", "stream": True}), outbox)
    reply.start(llm)
    return reply

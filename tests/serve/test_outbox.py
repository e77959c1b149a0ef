"""The thread that sends responses, when the server takes no more of one request."""

import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandemrt.runtime.requests.outputs import StreamOutput
from tandemrt.runtime.requests.text import Delta
from tests.waiting import PATIENCE_S


class Sender:
    """The server's end of one request. Closed, it raises, as the server's does once a final response was begun."""

    def __init__(self, *, closed: bool) -> None:
        self.closed = closed
        self.sent = threading.Event()

    def send(self, response: Any, flags: int = 0) -> None:  # noqa: ARG002 - the server's signature
        if self.closed:
            raise RuntimeError("Unable to send response. Response sender has been closed.")
        self.sent.set()


class Error(Exception):
    INTERNAL = 1


def test_a_request_that_cannot_even_be_refused_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    server = SimpleNamespace(  # exists only inside a server's process
        InferenceResponse=lambda **parts: parts,
        Tensor=lambda name, values: (name, np.asarray(values)),
        TritonError=Error,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", server)
    monkeypatch.delitem(sys.modules, "tandemrt.runtime.triton.responses", raising=False)
    from tandemrt.runtime.triton.requests import read_request
    from tandemrt.runtime.triton.responses import Outbox, Reply

    request = SimpleNamespace(prompt=[1], cancel=lambda: None)
    llm: Any = SimpleNamespace(submit=lambda *_: request)
    ask = read_request({}, {"text_input": "Hello", "stream": True})
    outbox, lost, served = Outbox(), Sender(closed=True), Sender(closed=False)
    for sender in (lost, served):
        reply = Reply(sender, ask, outbox)
        reply.start(llm)
        reply.listen(StreamOutput(Delta(text="a"), token_ids=[5]))
    assert served.sent.wait(PATIENCE_S)
    outbox.close()

"""What one request is answered with, by the code that runs inside the server's process."""

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandemrt import RequestOutput, StreamOutput
from tandemrt.engines.errors import BadRequest, InternalError, QueueFull
from tandemrt.runtime.requests.outputs import Speculation
from tandemrt.runtime.requests.text import Delta
from tandemrt.runtime.triton.requests import read_request


class Error(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "internal", "invalid argument", "unavailable", "cancelled"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Sender:
    """The server's end of one request."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, Any], int]] = []

    def send(self, response: dict[str, Any], flags: int = 0) -> None:
        self.sent.append((response, flags))


@pytest.fixture
def responses(monkeypatch: pytest.MonkeyPatch) -> Any:
    server = SimpleNamespace(  # exists only inside a server's process
        InferenceResponse=lambda **parts: parts,
        Tensor=lambda name, values: (name, np.asarray(values).tolist()),
        TritonError=Error,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", server)
    monkeypatch.delitem(sys.modules, "tandemrt.runtime.triton.responses", raising=False)
    return importlib.import_module("tandemrt.runtime.triton.responses")  # anew, whoever had it before


def output(reason: str, tokens: list[int], **more: Any) -> RequestOutput:
    given = {"stop_reason": None, "error": None} | more
    return RequestOutput(
        text="ab",
        reasoning="",
        token_ids=tokens,
        prompt_token_ids=[1],
        finish_reason=reason,
        seed=7,
        speculation=Speculation(4),
        forced_ends=0,
        **given,
    )


def answered(responses: Any, last: RequestOutput, failure: Exception | None = None) -> dict[str, Any]:
    """The one response to a request that ended with ``last``: its error, or its tensors by name."""
    sender, request = Sender(), SimpleNamespace(prompt=[1], cancel=lambda: None, failure=failure, others=())
    outbox = SimpleNamespace(put=lambda reply: reply.send())
    reply = responses.Reply(sender, read_request({}, {"text_input": "Hello"}), outbox)
    reply.start(SimpleNamespace(submit=lambda *_, **__: request))
    reply.listen(StreamOutput(Delta(text="ab"), token_ids=last.token_ids, output=last))
    [(response, flags)] = sender.sent
    assert flags == 1
    return {"error": response["error"]} if "error" in response else dict(response["output_tensors"])


def test_of_several_outputs_each_has_its_responses_and_the_last_one_is_final(responses: Any) -> None:
    sender = Sender()
    second = SimpleNamespace(prompt=[1], cancel=lambda: None, failure=None)
    first = SimpleNamespace(prompt=[1], cancel=lambda: None, failure=None, others=(second,))
    ask = read_request({}, {"text_input": "Hello", "n": 2, "stream": True, "exclude_input_in_output": False})
    reply = responses.Reply(sender, ask, SimpleNamespace(put=lambda reply: reply.send()))
    reply.start(SimpleNamespace(submit=lambda *_, **__: first))
    for index, text, last in ((1, "b", None), (0, "a", None), (0, "c", output("stop", [5]))):
        reply.listen(StreamOutput(Delta(text=text), token_ids=[5], output=last, index=index))
    reply.listen(StreamOutput(Delta(), [], replace(output("length", [5]), index=1), index=1))
    told = [(dict(sent["output_tensors"]), flags) for sent, flags in sender.sent]
    assert [(said["index"], said["text_output"], flags) for said, flags in told] == [
        ([1], [b"Hellob"], 0), ([0], [b"Helloa"], 0), ([0], [b"c"], 0), ([1], [b""], 1),
    ]  # fmt: skip
    assert [said.get("finish_reason") for said, _ in told] == [None, None, [b"stop"], [b"length"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadRequest("no"), "invalid argument"),
        (QueueFull("full"), "unavailable"),
        (InternalError("bug"), "internal"),
        (MemoryError(), "internal"),
    ],
)
def test_a_refusal_has_the_code_that_clients_know_for_it(responses: Any, error: Exception, code: str) -> None:
    sender = Sender()
    responses.refuse(sender, error)
    [(response, flags)] = sender.sent
    assert (response["error"].code, flags) == (code, 1)
    assert str(error) in str(response["error"])


@pytest.mark.parametrize(
    ("reason", "tokens", "code"),
    [("cancelled", [5], "cancelled"), ("cancelled", [], "cancelled"), ("timeout", [], "unavailable")],
)
def test_an_end_that_is_no_answer_is_an_error(responses: Any, reason: str, tokens: list[int], code: str) -> None:
    assert answered(responses, output(reason, tokens))["error"].code == code


def test_a_failure_is_told_and_not_the_text_before_it(responses: Any) -> None:
    error = answered(responses, output("error", [5]), InternalError("the engine failed"))["error"]
    assert (error.code, str(error)) == ("internal", "the engine failed")


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (output("length", [5, 6]), {"finish_reason": [b"length"]}),
        (output("timeout", [5]), {"finish_reason": [b"timeout"]}),
        (output("stop", [5], stop_reason="b"), {"finish_reason": [b"stop"], "stop_reason": [b"b"]}),
        (output("stop", [5], stop_reason=263), {"finish_reason": [b"stop"], "stop_reason": [b"263"]}),
        (
            output("constraint", [5], error="not valid"),
            {"finish_reason": [b"constraint"], "constraint_error": [b"not valid"]},
        ),
    ],
)
def test_an_answer_says_why_it_ended(responses: Any, last: RequestOutput, said: dict[str, Any]) -> None:
    found = answered(responses, last)
    assert {name: found.get(name) for name in said} == said
    assert ("stop_reason" in found, "constraint_error" in found) == ("stop_reason" in said, "constraint_error" in said)
    assert (found["text_output"], found["token_ids"], found["seed"]) == ([b"ab"], last.token_ids, [7])

"""Responses to one request, from the code that runs inside Triton's process."""

import importlib
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tandemrt import RequestOutput, StreamOutput
from tandemrt.engines.validation.errors import BadRequest, InternalError, QueueFull
from tandemrt.runtime.requests.request import Speculation
from tandemrt.runtime.requests.text import TextDelta
from tandemrt.runtime.servers.triton.request_tensors import parse_request


class Error(Exception):
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "internal", "invalid argument", "unavailable", "cancelled"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class Sender:
    """Stand-in for the server's end of one request."""

    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, Any], int]] = []

    def send(self, response: dict[str, Any], flags: int = 0) -> None:
        self.sent.append((response, flags))


@pytest.fixture
def triton(monkeypatch: pytest.MonkeyPatch) -> Any:
    """``ResponseStream`` and ``send_error``, imported with a stand-in for the server's module."""
    server = SimpleNamespace(  # this module exists only inside a server's process
        InferenceResponse=lambda **parts: parts,
        Tensor=lambda name, values: (name, np.asarray(values).tolist()),
        TritonError=Error,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", server)
    for module in ("responses", "response_stream"):
        monkeypatch.delitem(sys.modules, f"tandemrt.runtime.servers.triton.{module}", raising=False)
    stream = importlib.import_module("tandemrt.runtime.servers.triton.response_stream")
    return SimpleNamespace(ResponseStream=stream.ResponseStream, send_error=stream.send_error)


def output(reason: str, tokens: list[int], **more: Any) -> RequestOutput:
    fields = {"stop_reason": None, "error": None} | more
    return RequestOutput(
        text="ab",
        reasoning="",
        token_ids=tokens,
        prompt_token_ids=[1],
        finish_reason=reason,
        seed=7,
        speculation=Speculation(4),
        forced_ends=0,
        **fields,
    )


def answered(triton: Any, last: RequestOutput, failure: Exception | None = None) -> dict[str, Any]:
    """Return the one response to a request that ended with ``last``: its error, or its tensors by name."""
    sender, request = Sender(), SimpleNamespace(prompt=[1], failure=failure, others=())
    llm = SimpleNamespace(submit=lambda *_, **__: request, cancel=lambda _: None)
    queue = SimpleNamespace(put=lambda stream: stream.send())
    stream = triton.ResponseStream(llm, sender, parse_request({}, {"text_input": "Hello"}), queue)
    stream.submit()
    stream.on_output(StreamOutput(TextDelta(text="ab"), token_ids=last.token_ids, output=last))
    [(response, flags)] = sender.sent
    assert flags == 1
    return {"error": response["error"]} if "error" in response else dict(response["output_tensors"])


def test_every_output_has_its_responses_and_the_last_one_is_final(triton: Any) -> None:
    sender = Sender()
    second = SimpleNamespace(prompt=[1], failure=None)
    first = SimpleNamespace(prompt=[1], failure=None, others=(second,))
    parsed = parse_request({}, {"text_input": "Hello", "n": 2, "stream": True, "exclude_input_in_output": False})
    llm = SimpleNamespace(submit=lambda *_, **__: first, cancel=lambda _: None)
    stream = triton.ResponseStream(llm, sender, parsed, SimpleNamespace(put=lambda stream: stream.send()))
    stream.submit()
    for index, text, last in ((1, "b", None), (0, "a", None), (0, "c", output("stop", [5]))):
        stream.on_output(StreamOutput(TextDelta(text=text), token_ids=[5], output=last, index=index))
    stream.on_output(StreamOutput(TextDelta(), [], replace(output("length", [5]), index=1), index=1))
    sent = [(dict(response["output_tensors"]), flags) for response, flags in sender.sent]
    assert [(values["index"], values["text_output"], flags) for values, flags in sent] == [
        ([1], [b"Hellob"], 0), ([0], [b"Helloa"], 0), ([0], [b"c"], 0), ([1], [b""], 1),
    ]  # fmt: skip
    assert [values.get("finish_reason") for values, _ in sent] == [None, None, [b"stop"], [b"length"]]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (BadRequest("no"), "invalid argument"),
        (QueueFull("full"), "unavailable"),
        (InternalError("bug"), "internal"),
        (MemoryError(), "internal"),
    ],
)
def test_an_error_has_the_code_that_clients_expect(triton: Any, error: Exception, code: str) -> None:
    sender = Sender()
    triton.send_error(sender, error)
    [(response, flags)] = sender.sent
    assert (response["error"].code, flags) == (code, 1)
    assert str(error) in str(response["error"])


@pytest.mark.parametrize(
    ("reason", "tokens", "code"),
    [("cancelled", [5], "cancelled"), ("cancelled", [], "cancelled"), ("timeout", [], "unavailable")],
)
def test_a_cancelled_or_timed_out_request_ends_with_an_error(
    triton: Any, reason: str, tokens: list[int], code: str
) -> None:
    assert answered(triton, output(reason, tokens))["error"].code == code


def test_a_failure_replaces_the_text_before_it(triton: Any) -> None:
    error = answered(triton, output("error", [5]), InternalError("the engine failed"))["error"]
    assert (error.code, str(error)) == ("internal", "the engine failed")


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        (output("length", [5, 6]), {"finish_reason": [b"length"]}),
        (output("timeout", [5]), {"finish_reason": [b"timeout"]}),
        (output("stop", [5], stop_reason="b"), {"finish_reason": [b"stop"], "stop_reason": [b"b"]}),
        (output("stop", [5], stop_reason=263), {"finish_reason": [b"stop"], "stop_reason": [b"263"]}),
        (output("stop", [5], stop_reason=0), {"finish_reason": [b"stop"], "stop_reason": [b"0"]}),
        (output("stop", [5], logprobs=[]), {"finish_reason": [b"stop"], "logprobs": [b"[]"]}),
        (output("stop", [5], prompt_logprobs=[]), {"finish_reason": [b"stop"], "prompt_logprobs": [b"[]"]}),
        (
            output("constraint", [5], error="not valid"),
            {"finish_reason": [b"constraint"], "constraint_error": [b"not valid"]},
        ),
    ],
)
def test_the_last_response_has_the_finish_reason(triton: Any, last: RequestOutput, expected: dict[str, Any]) -> None:
    response = answered(triton, last)
    assert {name: response.get(name) for name in expected} == expected
    assert ("stop_reason" in response, "constraint_error" in response) == (
        "stop_reason" in expected,
        "constraint_error" in expected,
    )
    assert (response["text_output"], response["token_ids"], response["seed"]) == ([b"ab"], last.token_ids, [7])

"""An invalid request is rejected with the name of the input, without an effect on others."""

import json
from typing import Any

import pytest
import tritonclient.grpc as grpc
from tritonclient.utils import InferenceServerException

from tests.serve.client import Client, tensor
from tests.waiting import PATIENCE_S

HELLO = {"text_input": "Hello", "max_tokens": 4}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "exactly one of text_input, messages, input_ids"),
        ({"text_input": "a", "input_ids": [1, 2]}, "exactly one of"),
        ({"text_input": "", "max_tokens": 4}, "at least one token"),
        ({**HELLO, "max_tokns": 4}, "max_tokns: is no input of this model (did you mean 'max_tokens'?)"),
        ({**HELLO, "parameters": {"top_a": 1}}, "top_a: is no input"),
        ({**HELLO, "n": 2}, "n: several outputs need a stream, received 2 without; send stream true"),
        ({**HELLO, "length_penalty": 0.5}, "length_penalty: is not supported"),
        ({**HELLO, "logit_bias": '{"7": 101}'}, "logit_bias.7: must be at most 100.0"),
        ({**HELLO, "temperature": -1.0}, "temperature: must be at least 0"),
        ({**HELLO, "max_tokens": 0}, "max_tokens: must be at least 1"),
        ({**HELLO, "max_tokens": 600}, "maximum context length is 512 tokens"),
        ({**HELLO, "max_tokens": 2**40}, "1099511627776"),
        ({**HELLO, "max_tokens": 2**32 + 4}, "4294967300"),
        ({**HELLO, "max_tokens": -(2**40)}, "-1099511627776"),
        ({**HELLO, "num_draft_tokens": 2**32 + 1}, "4294967297"),
        ({**HELLO, "stop_token_ids": [2**32 + 5]}, "4294967301"),
        ({**HELLO, "allowed_token_ids": [2**32 + 5]}, "4294967301"),
        ({"input_ids": [2**32 + 5]}, "token ids must be in 0.."),
        ({**HELLO, "sampling_parameters": json.dumps({"seed": 2**64})}, "seed: must be less than 18446744073709551616"),
        ({**HELLO, "sampling_parameters": json.dumps({"seed": -(2**63) - 1})}, "seed: must be at least -9223372"),
        ({**HELLO, "num_draft_tokens": 9}, "num_draft_tokens: this runtime drafts at most 4"),
        ({**HELLO, "rule": "lucky"}, "rule"),
        ({**HELLO, "messages": "[]"}, "exactly one of"),
        ({"messages": "[1]"}, "messages: must be a JSON list of objects"),
        ({"messages": "{"}, "messages: must be JSON"),
        ({"input_ids": [5, 99999]}, "token ids must be in"),
        ({**HELLO, "structured_outputs": "{"}, "structured_outputs: must be JSON"),
        ({**HELLO, "structured_outputs": '{"jason": 1}'}, "jason"),
        ({**HELLO, "structured_outputs": '{"regex": "["}'}, "regex: a missing closing bracket cannot be enforced"),
        ({**HELLO, "structured_outputs": '{"json": {"not": {}}}'}, "not"),
        ({**HELLO, "guided_decoding_guide": "x"}, "guided_decoding_guide: must come with"),
        ({**HELLO, "guided_decoding_guide_type": "prose"}, "guided_decoding_guide_type: must be one of"),
        ({**HELLO, "guided_decoding_guide_type": "regex"}, "guided_decoding_guide: must come with"),
        ({**HELLO, "sampling_parameters": "[]"}, "sampling_parameters: must be a JSON object"),
        ({**HELLO, "sampling_parameters": '{"max_tokens": 5}'}, "max_tokens: given twice"),
        ({**HELLO, "sampling_parameters": '{"stream": true}'}, "send it as an input"),
        ({**HELLO, "sampling_parameters": '{"top_a": 1}'}, "top_a: is no input"),
        ({**HELLO, "stop": ["a"], "stop_words": ["b"]}, "stop: given twice"),
        ({**HELLO, "stop": [""]}, "stop"),
        ({"input_ids": [5], "exclude_input_in_output": False}, "exclude_input_in_output"),
        ({**HELLO, "timeout": -3}, "timeout: must be a positive number of microseconds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_an_invalid_request_is_rejected_with_the_name_of_the_input(
    demo: Client, body: dict[str, Any], said: str
) -> None:
    status, answer = demo.generate(**body)
    assert status == 400, answer
    assert said in answer["error"]
    assert demo.generate(**HELLO)[0] == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"text_input": 5}', b'{"text_input": {}}', b'{"text_input": "a", "seed": -1}'],
)  # fmt: skip
def test_malformed_bodies_are_rejected_and_other_requests_run(demo: Client, body: bytes) -> None:
    connection = demo.post("generate", body)
    answer = connection.getresponse()
    assert answer.status in (400, 500)  # the server rejects these itself, before a model receives the request
    assert "error" in json.loads(answer.read())
    connection.close()
    assert demo.generate(**HELLO)[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        {"text_input": "word " * 200_000},
        {"input_ids": [7] * 100_000},
        {**HELLO, "stop": ["x" * 1000] * 1000},
        {**HELLO, "structured_outputs": json.dumps({"choice": ["a" * 200_000]})},
        {**HELLO, "structured_outputs": json.dumps({"regex": "((a{1,900}){1,900}){1,900}"})},
        {**HELLO, "structured_outputs": '{"json":' + "[" * 100_000 + "]" * 100_000 + "}"},
        {**HELLO, "banned_token_ids": list(range(100_000))},
    ],
    ids=["text", "ids", "stops", "choice", "regex", "depth", "banned"],
)
def test_oversized_inputs_are_rejected_and_other_requests_run(demo: Client, body: dict[str, Any]) -> None:
    status, answer = demo.generate(**body)
    assert status in (200, 400), answer
    assert ("error" in answer) == (status == 400)
    assert demo.generate(**HELLO)[0] == 200


def test_an_error_in_a_stream_is_its_last_event(demo: Client) -> None:
    [event] = demo.stream(**HELLO, beam_width=3)
    assert "beam_width: is not supported" in event["error"]


def test_a_request_that_times_out_keeps_its_text(demo: Client) -> None:
    """The timeout doubles until a token arrives in time. 500 tokens take far longer on any machine."""
    timeout_s, status, answer = 0.05, 400, {}
    while status != 200:
        assert timeout_s < PATIENCE_S, answer
        status, answer = demo.generate(text_input="Please send", ignore_eos=True, timeout_s=timeout_s)
        timeout_s *= 2
    assert answer["finish_reason"] == "timeout"
    assert 0 < answer["num_output_tokens"] < 500


@pytest.mark.parametrize("how", [{"timeout_s": 1e-6}, {"timeout": 1}])
def test_a_request_without_time_for_a_token_is_an_error(demo: Client, how: dict[str, Any]) -> None:
    _, answer = demo.generate(**HELLO, **how)
    assert "request timeout expired" in answer["error"]


def test_tritons_timeout_applies(demo: Client) -> None:
    with pytest.raises(InferenceServerException, match="request timeout expired"):
        demo.grpc(**HELLO, timeout_us=1)


def test_grpc_names_an_unknown_input(demo: Client) -> None:
    with pytest.raises(InferenceServerException, match="beams"):
        demo.grpc(**HELLO, beams=2)


def test_the_server_rejects_a_unary_grpc_call_of_a_decoupled_model(demo: Client) -> None:
    client = grpc.InferenceServerClient(f"127.0.0.1:{demo.server.grpc}")
    with client, pytest.raises(InferenceServerException, match="decoupled"):
        client.infer(demo.model, [tensor("text_input", "Hello")])

"""Every part of a sum, a table and a message counts: none alone is left out."""

import asyncio
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import h11
import pytest

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.runtime.requests.logprobs import TokenLogprobs
from tandemrt.runtime.requests.request import RequestOutput
from tandemrt.runtime.servers.http import rendering
from tandemrt.runtime.servers.http.cancelled_answers import SentResponse
from tandemrt.runtime.servers.http.framing import SMALL_CHUNKS, StrictConnection
from tandemrt.runtime.servers.http.rendering import SMALL, AnswerWriter
from tandemrt.runtime.servers.openai.errors import _INTERNAL, _STATUSES
from tandemrt.runtime.servers.openai.responses_request import parse_responses
from tandemrt.runtime.servers.request_stream import OutputDelta
from tests.plain.test_openai_choices import output_of

TOP = TokenLogprobs(1, -0.5, ((1, -0.5), (2, -1.0)))
NO_CODES = {"timeout_s"}  # of the table of statuses
LONG = 16 * (SMALL + 1)
OUTPUTS: dict[str, RequestOutput] = {
    "text": output_of("x" * LONG),
    "reasoning": output_of(reasoning="x" * LONG),
    "tokens": output_of(token_ids=[1] * (SMALL + 1)),
    "prompt tokens": output_of(prompt_token_ids=[1] * (SMALL + 1)),
    "logprobs": output_of(logprobs=[TOP] * (SMALL // 3 + 1)),
    "prompt logprobs": output_of(prompt_logprobs=[TOP] * (SMALL // 3 + 1)),
}
DELTAS = {
    "text": OutputDelta(0, "x" * LONG, "", (), (), None),
    "reasoning": OutputDelta(0, "", "x" * LONG, (), (), None),
    "tokens": OutputDelta(0, "", "", [1] * (SMALL + 1), (), None),
    "logprobs": OutputDelta(0, "", "", (), [TOP] * (SMALL // 3 + 1), None),
} | {f"{name} of the output": OutputDelta(0, "", "", (), (), output) for name, output in OUTPUTS.items()}


def values_of(write: Callable[[AnswerWriter], Any], values: int = 0) -> int:
    """How many values ``write`` says that an answer has; more than SMALL of them do not keep other clients waiting."""
    said = list[int]()

    async def render(_threads: object, _client: object, values: int, _encode: object) -> bytes:
        said.append(values)
        return b""

    nothing = cast("Any", None)
    with patch.object(rendering, "render", render):
        asyncio.run(write(AnswerWriter(nothing, nothing, nothing, nothing, values)))
    return said[0]


@pytest.mark.parametrize("part", OUTPUTS)
def test_an_answer_is_large_by_any_part_of_its_last_output(part: str) -> None:
    small = output_of()
    assert values_of(lambda writer: writer.answer([small, OUTPUTS[part]])) > SMALL
    assert values_of(lambda writer: writer.answer([small, small])) < SMALL


@pytest.mark.parametrize("part", DELTAS)
def test_events_are_large_by_any_part_of_their_last_delta(part: str) -> None:
    small = OutputDelta(0, "a", "", [1], (), None)
    assert values_of(lambda writer: writer.events([small, DELTAS[part]], 3)) > SMALL
    assert values_of(lambda writer: writer.events([small, small], 3)) < SMALL


def test_the_values_of_an_answer_besides_its_outputs_count() -> None:
    assert values_of(lambda writer: writer.answer([output_of()]), SMALL) > SMALL
    assert values_of(lambda writer: writer.events([replace(DELTAS["tokens"], token_ids=[1])], 3), SMALL) > SMALL


def test_every_status_and_code_of_an_error_is_that_of_the_documents() -> None:
    text = (Path(__file__).parents[2] / "docs" / "openai.md").read_text()
    rows = dict(re.findall(r"^\| (\d{3}) \| (.*) \|$", text, re.MULTILINE))
    codes: dict[str, set[str]] = {}
    for known in (*_STATUSES.values(), _INTERNAL):
        codes.setdefault(str(known.status), set()).update([known.code] if known.code else [])
        family = "server_error" if known.status >= 500 else "invalid_request_error"
        assert known.type == ("rate_limit_error" if known.status == 429 else family)
    assert codes == {
        status: {*re.findall(r"`([a-z]+_[a-z_]+|closed|overloaded|timeout)`", rows[status])} - NO_CODES
        for status in rows
    }


@pytest.mark.parametrize(
    ("messages", "state"),
    [
        ([], (False, False, False)),
        (
            [{"type": "http.response.start", "headers": [(b"content-type", b"text/event-stream; x")]}],
            (True, True, False),
        ),
        ([{"type": "http.response.start", "headers": []}, {"type": "http.response.body"}], (True, False, True)),
        ([{"type": "http.response.body", "more_body": True}], (False, False, False)),
        ([{"type": "http.response.body", "more_body": True}, {"type": "http.response.body"}], (False, False, True)),
    ],
)
def test_a_response_is_complete_after_its_last_part_only(messages: list[Any], state: tuple[bool, ...]) -> None:
    passed = list[Any]()

    async def send(message: Any) -> None:
        passed.append(message)

    sent = SentResponse(send)
    for message in messages:
        asyncio.run(sent.send(message))
    assert (sent.started, sent.events, sent.complete) == state
    assert passed == messages


def test_each_body_of_a_connection_has_chunks_of_its_own() -> None:
    connection = StrictConnection(1 << 14)
    head = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    for _ in range(2):
        connection.receive_data(head + b"1\r\na\r\n" * (SMALL_CHUNKS - 1) + b"0\r\n\r\n")
        while type(connection.next_event()) is not h11.EndOfMessage:
            pass
        connection.send(h11.Response(status_code=200, headers=[(b"content-length", b"0")]))
        connection.send(h11.EndOfMessage())
        connection.start_next_cycle()


def test_every_field_of_a_wanted_schema_reaches_the_constraint() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "name": "a", "description": "b", "schema": schema, "strict": True}
    request = parse_responses({"input": "x", "text": {"format": wanted}}, {"default": "{{ messages }}"})
    assert request.params.structured_outputs == StructuredOutputs(json=schema)

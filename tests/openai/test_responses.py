"""/v1/responses to OpenAI's own client: the answers of a chat as items, complete and streamed."""

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tandemrt import LLM, SamplingParams
from tests.openai.client import EXAMPLES, Served, named_events
from tests.openai.test_answers import answer_of
from tests.openai.test_tools import COUNT, NESTED

TOOLS: list[Any] = [
    {"type": "function", "name": "send", "parameters": NESTED},
    {"type": "function", "name": "count", "description": "counts", "parameters": COUNT, "strict": True},
]


def asked(example: Any, **more: Any) -> dict[str, Any]:
    wanted = {"format": {"type": "json_schema", "name": example.kind, "schema": example.schema}}
    return {"model": "demo", "input": example.prompt_messages(), "text": wanted, "extra_body": {"seed": 7}, **more}


def items(response: Any) -> list[tuple[str, str]]:
    """The type and text of each item."""
    return [
        (item.type, item.arguments if item.type == "function_call" else "".join(part.text for part in item.content))
        for item in response.output
    ]


def test_a_response_equals_the_python_api(client: openai.OpenAI, llm: LLM) -> None:
    expected = answer_of(llm, EXAMPLES[0], seed=7)
    response = client.responses.create(**asked(EXAMPLES[0]))
    assert items(response) == [("reasoning", expected.reasoning), ("message", expected.text)]
    assert (response.output_text, response.status, response.incomplete_details) == (expected.text, "completed", None)
    assert response.usage.input_tokens == len(expected.prompt_token_ids)
    assert response.usage.output_tokens == len(expected.token_ids)
    assert response.usage.output_tokens_details.reasoning_tokens == expected.reasoning_tokens > 0
    assert response.metrics["speculative_decoding"] == expected.speculation.to_json()
    assert (response.seed, response.store) == (7, False)


def test_a_text_and_instructions_are_a_chat(client: openai.OpenAI, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two boxes."}]
    expected = llm.generate(messages, SamplingParams(seed=3, max_tokens=9, temperature=0.5))
    asked: dict[str, Any] = {"model": "demo", "temperature": 0.5, "max_output_tokens": 9, "extra_body": {"seed": 3}}
    response = client.responses.create(input="Two boxes.", instructions="Be brief.", **asked)
    assert response.usage.input_tokens == len(expected.prompt_token_ids)
    assert "".join(text for _, text in items(response)) == expected.reasoning + expected.text
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[-1].status == "incomplete"
    repeated = (response.instructions, response.temperature, response.max_output_tokens)
    assert repeated == ("Be brief.", 0.5, 9)


def test_a_stream_builds_the_same_response(client: openai.OpenAI) -> None:
    whole = client.responses.create(**asked(EXAMPLES[1]))
    with client.responses.stream(**asked(EXAMPLES[1])) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert items(final) == items(whole)
    assert final.usage.output_tokens == whole.usage.output_tokens
    deltas: dict[str, str] = {"response.reasoning_text.delta": "", "response.output_text.delta": ""}
    for event in events:
        if event.type in deltas:
            deltas[event.type] += event.delta
    assert list(deltas.values()) == [text for _, text in items(whole)]
    named = [event for event in events if hasattr(event, "item_id")]
    assert len(named) > 20
    assert len(final.output) == 2
    assert all(final.output[event.output_index].id == event.item_id for event in named)


@pytest.mark.parametrize(
    ("seed", "more"),
    [
        (1, {"tool_choice": "required", "tools": TOOLS}),
        (2, {"tool_choice": {"type": "function", "name": "count"}, "tools": TOOLS}),
        (3, {}),
        (4, {"max_output_tokens": 70}),
    ],
)
def test_responses_and_events_match_openais_schema(served: Served, seed: int, more: dict[str, Any]) -> None:
    body = {"input": [{"role": "user", "content": "Two boxes."}], "seed": seed, "thinking_token_budget": 9}
    limited = {"max_output_tokens": 90} | body | more
    status, response, _ = served.ask("/v1/responses", limited)
    assert status == 200
    Response.model_validate(response, strict=True)
    events = named_events(served, "/v1/responses", limited | {"stream": True})
    for number, (name, event) in enumerate(events):
        TypeAdapter(ResponseStreamEvent).validate_python(event, strict=True)
        assert (name, number) == (event["type"], event["sequence_number"])
    assert [name for name, _ in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1][1]["response"]
    assert events[-1][0] == f"response.{response['status']}"
    assert _without_ids(last) == _without_ids(response)
    done = [event["item"] for name, event in events if name == "response.output_item.done"]
    assert done[:-1] == last["output"][:-1]
    for name in ("response.output_item.added", "response.output_item.done"):
        places = [(event["output_index"], event["item"]["id"]) for kind, event in events if kind == name]
        assert places == [(index, item["id"]) for index, item in enumerate(last["output"])][: len(places)]
        assert len(places) >= len(last["output"]) - (name == "response.output_item.done")


def _without_ids(response: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in response.items() if name not in ("id", "created_at", "usage")}
    output = [{name: value for name, value in item.items() if "id" not in name} for item in response["output"]]
    return {**kept, "output": output}


def test_calls_are_items_and_their_results_go_back(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "tools": TOOLS, "extra_body": {"seed": 1, "thinking_token_budget": 5}}
    conversation: list[Any] = [{"role": "user", "content": "Two boxes."}]
    first = client.responses.create(input=conversation, tool_choice={"type": "function", "name": "count"}, **asked)
    [*reasoning, call] = first.output
    assert [item.type for item in reasoning] == ["reasoning"]
    assert (call.type, call.name) == ("function_call", "count")
    jsonschema.validate(json.loads(call.arguments), COUNT)
    conversation += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "done"}]
    second = client.responses.create(input=conversation, tool_choice="none", max_output_tokens=8, **asked)
    assert "function_call" not in [item.type for item in second.output]
    assert second.usage.input_tokens > first.usage.input_tokens


def test_an_answer_parses_into_a_pydantic_model(client: openai.OpenAI) -> None:
    class Order(BaseModel):
        kind: Literal["order"]
        customer: str
        currency: Literal["EUR", "USD", "GBP"]

    message = "Please put 1 pine box at £26.55 on the account of Leo Conti."
    response = client.responses.parse(model="demo", input=message, text_format=Order, temperature=0)
    assert response.output_parsed == Order(kind="order", customer="Leo Conti", currency="GBP")


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "auto"}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "the server stores no responses"),
        ({"input": []}, "input", "must be a text or a non-empty list of items, received []"),
        ({"input": 7}, "input", "must be a text or a non-empty list of items, received 7"),
        ({"input": None}, "input", "is required and missing"),
        ({"input": [{"type": "image", "x": 1}]}, "input.0.type", "must be one of message, function_call"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", "must be one of system, developer"),
        ({"input": [{"role": "user", "content": [IMAGE]}]}, "input", "text only"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.image_url", "a text"),
        ({"input": [{"role": "user", "content": [IMAGE | {"file_id": "a"}]}]}, "input.0.content.0.file_id", "no field"),
        ({"input": [{"role": "assistant", "content": [IMAGE]}]}, "input.0.content.0", "must be a part of text"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.file_data", "a text"),
        ({"input": [{"role": "user", "content": [{"type": "input_audio"}]}]}, "input.0.content.0", "a part of text"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input.0.name", "must be a text, received None"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input.0.encrypted_content", "cannot decrypt"),
        ({"input": [{"role": "user", "content": "x", "speed": 1}]}, "input.0.speed", "is no field of a message"),
        ({"input": "x" * 100_000}, "input", "maximum context length is 512 tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "must be at least 1; got 0"),
        ({"max_tokens": 5}, "max_tokens", "send max_output_tokens"),
        ({"n": 2}, "n", "is not supported"),
        ({"background": True}, "background", "is not supported"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format", "not"),
        ({"temperatur": 1}, "temperatur", "did you mean 'temperature'?"),
    ],
)
def test_a_wrong_field_is_named_as_the_client_sent_it(
    served: Served, fields: dict[str, Any], param: str, message: str
) -> None:
    status, body, _ = served.ask("/v1/responses", {"input": "x", **fields})
    assert (status, body["error"]["param"]) == (400, param)
    assert message in body["error"]["message"]


def test_fields_without_effect_are_accepted(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "demo", "input": "Two boxes.", "max_output_tokens": 5, "extra_body": {"seed": 1}}
    ignored: dict[str, Any] = {
        "store": True,
        "metadata": {"a": "b"},
        "prompt_cache_key": "me",
        "safety_identifier": "me",
        "truncation": "disabled",
        "background": False,
        "include": ["reasoning.encrypted_content"],
        "reasoning": {"summary": "auto"},
        "text": {"verbosity": "medium"},
    }
    plain = client.responses.create(**asked)
    asked["extra_body"] |= {"client_metadata": {"x-codex-installation-id": "a"}}
    full = client.responses.create(**asked, **ignored)
    assert items(full) == items(plain)
    assert full.metadata == {"a": "b"}

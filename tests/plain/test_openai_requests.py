"""Bodies of OpenAI requests become prompts and parameters: every field has its effect, and no other."""

import json
import time
from dataclasses import replace
from typing import Any

import pytest

from tandemrt import Chat, SamplingParams, StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.servers.openai.protocol import StreamOptions
from tandemrt.runtime.servers.openai.request_body import (
    NO_OP_VALUES,
    CompletionRequest,
    parse_chat,
    parse_completion,
    parse_json,
)
from tandemrt.runtime.workers.clients import Client
from tests.plain.tool_call_templates import TEMPLATES

MESSAGES = [{"role": "user", "content": "x"}]
CHAT_TEMPLATES = {"default": TEMPLATES["hermes"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("f", "g")]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**fields: Any) -> CompletionRequest:
    return parse_chat({"messages": MESSAGES, **fields}, CHAT_TEMPLATES)


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion({"prompt": "x", **fields}, CHAT_TEMPLATES)


ENDPOINTS = [chat, completion]


@pytest.mark.parametrize("ask", ENDPOINTS)
@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({}, "client", Client()),
        ({"user": None}, "client", Client()),
        ({"user": ""}, "client", Client()),
        ({"user": "me"}, "client", Client(user="me")),
        ({}, "model", None),
        ({"model": "m"}, "model", "m"),
        ({}, "stream", False),
        ({"stream": True}, "stream", True),
        ({}, "stream_options", StreamOptions()),
        ({"stream": True, "stream_options": {}}, "stream_options", StreamOptions()),
        (
            {"stream": True, "stream_options": {"include_usage": True}},
            "stream_options",
            StreamOptions(include_usage=True, continuous_usage_stats=False),
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options",
            StreamOptions(include_usage=False, continuous_usage_stats=True),
        ),
        ({}, "return_token_ids", False),
        ({"return_token_ids": True}, "return_token_ids", True),
        ({}, "tool_calls", None),
        ({}, "params", SamplingParams()),
        ({"seed": 3, "temperature": None}, "params", SamplingParams(seed=3)),
    ],
)
def test_a_field_sets_its_attribute(ask: Any, fields: dict[str, Any], attribute: str, value: Any) -> None:
    assert getattr(ask(**fields), attribute) == value


@pytest.mark.parametrize("ask", ENDPOINTS)
def test_stream_options_must_come_with_a_stream(ask: Any) -> None:
    with pytest.raises(BadRequest, match="stream_options: must come with stream true"):
        ask(stream_options={})


@pytest.mark.parametrize(
    ("fields", "logprobs"),
    [
        ({}, None),
        ({"logprobs": None}, None),
        ({"logprobs": False}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True, "top_logprobs": 0}, 0),
        ({"logprobs": True, "top_logprobs": 1}, 1),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_a_chat_asks_for_as_many_alternatives_as_top_logprobs(fields: dict[str, Any], logprobs: int | None) -> None:
    assert chat(**fields).params.logprobs == logprobs


@pytest.mark.parametrize("fields", [{"top_logprobs": 1}, {"logprobs": False, "top_logprobs": 1}])
def test_top_logprobs_without_logprobs_are_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="top_logprobs: must come with logprobs true, received 1"):
        chat(**fields)


@pytest.mark.parametrize("logprobs", [None, 0, 1])
def test_logprobs_of_a_completion_are_a_number(logprobs: int | None) -> None:
    assert completion(logprobs=logprobs).params.logprobs == logprobs


@pytest.mark.parametrize(
    ("fields", "max_tokens"),
    [
        ({}, SamplingParams().max_tokens),
        ({"max_tokens": 4}, 4),
        ({"max_completion_tokens": 5}, 5),
        ({"max_tokens": 5, "max_completion_tokens": 5}, 5),
    ],
)
def test_max_completion_tokens_is_an_alias(fields: dict[str, Any], max_tokens: int | None) -> None:
    assert chat(**fields).params.max_tokens == max_tokens


@pytest.mark.parametrize("other", [4, 6])
def test_two_different_maximums_are_rejected(other: int) -> None:
    with pytest.raises(BadRequest, match=f"max_completion_tokens: is an alias of max_tokens, received 5 and {other}"):
        chat(max_completion_tokens=5, max_tokens=other)


NAMED = {"type": "function", "function": {"name": "g"}}


@pytest.mark.parametrize(
    ("choice", "described", "callable_names", "skips_special_tokens"),
    [
        (None, ["f", "g"], ["f", "g"], False),
        ("auto", ["f", "g"], ["f", "g"], False),
        ("required", ["f", "g"], ["f", "g"], True),
        (NAMED, ["f", "g"], ["g"], True),
        ("none", [], None, True),
    ],
)
def test_tool_choice_decides_what_the_model_sees_and_may_call(
    choice: Any, described: list[str], callable_names: list[str] | None, skips_special_tokens: bool
) -> None:
    """Only the model's own format may begin a call with a control token, which must stay in the text then."""
    request = chat(tools=TOOLS, tool_choice=choice)
    assert isinstance(request.prompt, Chat)
    assert list(request.prompt.tools) == [each for each in TOOLS if each["function"]["name"] in described]
    called = request.tool_calls
    assert (None if called is None else [each.name for each in called.functions]) == callable_names
    assert request.params.skip_special_tokens is skips_special_tokens
    assert (request.params.structured_outputs is None) == (called is None)


@pytest.mark.parametrize("tools", [None, []])
@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_without_tools_the_text_is_free(tools: Any, choice: Any) -> None:
    request = chat(tools=tools, tool_choice=choice)
    assert isinstance(request.prompt, Chat)
    assert list(request.prompt.tools) == []
    assert (request.tool_calls, request.params) == (None, SamplingParams())


@pytest.mark.parametrize(
    ("wanted", "constraint"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutputs(json_object=True)),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
    ],
)
def test_a_response_format_is_a_constraint(wanted: Any, constraint: StructuredOutputs | None) -> None:
    assert chat(response_format=wanted).params.structured_outputs == constraint


def test_two_constraints_on_a_text_are_rejected() -> None:
    with pytest.raises(BadRequest, match=r"^structured_outputs: only one .* received regex and a format"):
        chat(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert chat(response_format={"type": "text"}, structured_outputs={"regex": "a"}).params.structured_outputs


SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": json.dumps(SCHEMA)}},
]


@pytest.mark.parametrize("fields", SCHEMAS)
def test_a_schema_with_tools_is_that_of_an_answer_without_calls(fields: dict[str, Any]) -> None:
    request = chat(tools=TOOLS, **fields)
    assert request.tool_calls is not None
    assert request.tool_calls.answer_schema == SCHEMA
    for choice in ("required", NAMED):
        assert chat(tools=TOOLS, tool_choice=choice, **fields).params == chat(tools=TOOLS, tool_choice=choice).params
    without = chat(tools=TOOLS, tool_choice="none", **fields)
    assert without.params == chat(**fields).params


@pytest.mark.parametrize(
    ("structured", "message"),
    [
        ({"regex": "a"}, ": with tools must be json or json_object .* received .*regex"),
        ({"choice": ["a"]}, ": with tools must be json or json_object .* received .*choice"),
        ({"json": SCHEMA, "validate_output": True}, ": with tools must be .* without options"),
        ({"json": "{"}, r"\.json: the schema is not JSON"),
    ],
)
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_other_constraints_with_tools_are_rejected(structured: dict[str, Any], message: str, choice: str) -> None:
    with pytest.raises(BadRequest, match=f"^structured_outputs{message}"):
        chat(tools=TOOLS, tool_choice=choice, structured_outputs=structured)


@pytest.mark.parametrize(
    ("variables", "effort", "expected"),
    [
        ({}, None, {}),
        ({"a": 1}, None, {"a": 1}),
        ({"a": 1}, "low", {"a": 1, "reasoning_effort": "low"}),
        ({"reasoning_effort": "low"}, "low", {"reasoning_effort": "low"}),
    ],
)
def test_reasoning_effort_is_a_template_variable(
    variables: dict[str, Any], effort: str | None, expected: dict[str, Any]
) -> None:
    prompt = chat(chat_template_kwargs=variables, reasoning_effort=effort).prompt
    assert isinstance(prompt, Chat)
    assert prompt.chat_template_kwargs == expected


def test_documents_are_a_template_variable() -> None:
    documents = [{"title": "a"}]
    prompt = chat(documents=documents, reasoning_effort="low", chat_template_kwargs={"b": 1}).prompt
    assert isinstance(prompt, Chat)
    assert prompt.chat_template_kwargs == {"b": 1, "documents": documents, "reasoning_effort": "low"}
    with pytest.raises(BadRequest, match="documents: given twice"):
        chat(documents=documents, chat_template_kwargs={"documents": []})


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("x", "x"), (["x"], "x"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([], []), ("", "")],
)
def test_a_list_of_one_prompt_is_that_prompt(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompt == expected


@pytest.mark.parametrize("prompts", [["x", "y"], [[1], [2]], ["x", [1]]])
def test_a_list_of_prompts_is_one_request_per_prompt(prompts: Any) -> None:
    request = completion(prompt=prompts, seed=3, n=2)
    assert list(request.prompts) == prompts
    assert [each.prompts for each in request.by_prompt()] == [(each,) for each in prompts]
    assert all(each.params == request.params for each in request.by_prompt())


def test_bytes_that_a_response_repeats_are_not_needed_by_the_prompts_alone() -> None:
    parsed = completion(prompt=["é" * 10, "abc"])
    repeated = [{}, {"user": "abcd"}, {"user": "a" * 99}]
    assert [replace(parsed, repeated=each).prompt_bytes for each in repeated] == [23, 19, 0]
    assert replace(parsed, echo=True).prompt_bytes == 0


@pytest.mark.parametrize(("count", "n"), [(129, 1), (65, 2), (1, 128), (128, 1)])
def test_the_choices_of_all_prompts_are_limited(count: int, n: int) -> None:
    if count * n <= 128:
        assert len(completion(prompt=["x"] * count, n=n).prompts) == count
        return
    with pytest.raises(
        BadRequest, match=f"prompt: at most 128 choices per request, received {count} prompts with n {n}"
    ):
        completion(prompt=["x"] * count, n=n)


@pytest.mark.parametrize("ask", ENDPOINTS)
@pytest.mark.parametrize("name", NO_OP_VALUES)
def test_an_unsupported_field_is_accepted_only_at_values_without_effect(ask: Any, name: str) -> None:
    plain = ask()
    for value in (*NO_OP_VALUES[name], None):
        request = ask(**{name: value})
        assert (request.prompt, request.params) == (plain.prompt, plain.params)
    with pytest.raises(BadRequest, match=f"^{name}: .*received 17"):
        ask(**{name: 17})


@pytest.mark.parametrize("last", [r"\ud83d\ude00", r"\ud83d"], ids=["a pair", "a lone one"])
def test_surrogates_are_looked_for_once_in_a_body_of_many_keys(last: str) -> None:
    body = "{" + "".join(f'"k{number}":1,' for number in range(30_000)) + f'"{last}":1}}'
    begun = time.process_time()
    if "de00" in last:
        assert len(parse_json(body.encode())) == 30_001
    else:
        with pytest.raises(BadRequest, match=r"must be text that UTF-8 can encode, received 1; join or drop lone"):
            parse_json(body.encode())
    assert time.process_time() - begun < 2.0, "one search per key would take 10 s"


def test_a_body_is_one_json_object() -> None:
    assert parse_json('{"a": ["é", 1e3, null]}'.encode()) == {"a": ["é", 1000.0, None]}
    for body in (b"[]", b"1", b"null", b'{"a": Infinity}', b'{"a": NaN}', b"{} {}"):
        with pytest.raises(BadRequest, match="the body must be"):
            parse_json(body)

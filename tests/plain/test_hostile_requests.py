"""Any value anywhere in the body of a request is read or rejected: the server's own errors are for its own faults."""

import json
from typing import Any

import pytest

from tandemrt.engines.parameters.sampling import StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest, TandemError
from tandemrt.runtime.grammars.sources import read
from tandemrt.runtime.servers.openai.protocols import ENDPOINTS
from tests.plain.test_fast_validation import KEYWORDS
from tests.plain.test_hostile_files import changed, places

VALUES = (None, [], {}, [{"type": []}], {"type": {}}, "", "\ud800", -1, 10**400, True)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
COUNT = {"name": "count", "description": "c", "parameters": SCHEMA, "strict": True}
CALL = {"id": "call_1", "type": "function", "function": {"name": "count", "arguments": '{"n": 1}'}}
USER = {"role": "user", "content": "x"}
IMAGE = "data:image/png;base64,AAAA"
BODIES: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "text", "text": "x"},
                        {"type": "image_url", "image_url": {"url": IMAGE, "detail": "low"}},
                        {"type": "file", "file": {"file_data": "AAAA", "filename": "a.png"}},
                    ],
                },
                {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "3"},
            ],
            "tools": [{"type": "function", "function": COUNT}],
            "tool_choice": {"type": "function", "function": {"name": "count"}},
            "stream": True,
            "stream_options": {"include_usage": True},
            "stop": ["a"],
            "logit_bias": {"5": 1.0},
            "metadata": {"a": "b"},
            "chat_template_kwargs": {"enable_thinking": False},
            "documents": [{"title": "a", "text": "b"}],
        },
    ),
    ("/v1/chat/completions", {"messages": [USER], "structured_outputs": {"json": SCHEMA, "whitespace": "compact"}}),
    (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}},
        },
    ),
    ("/v1/completions", {"prompt": ["a", [1, 2]], "logprobs": 2, "echo": True}),
    (
        "/v1/responses",
        {
            "input": [
                {
                    "type": "message",
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "x"},
                        {"type": "input_image", "image_url": IMAGE, "detail": "low"},
                        {"type": "input_file", "file_url": "http://a/"},
                    ],
                    "status": "completed",
                },
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "r"}], "summary": []},
                {"type": "function_call", "call_id": "c", "name": "count", "arguments": '{"n":1}'},
                {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "x"}]},
            ],
            "tools": [{"type": "function", **COUNT}],
            "tool_choice": {"type": "function", "name": "count"},
            "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
            "reasoning": {"effort": "low", "summary": "auto"},
        },
    ),
    (
        "/v1/messages",
        {
            "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}},
                        {"type": "image", "source": {"type": "url", "url": "http://a/"}},
                    ],
                },
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": ""},
                        {"type": "tool_use", "id": "t", "name": "count", "input": {"n": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "text", "text": "3"}]}
                    ],
                },
            ],
            "tools": [{"name": "count", "description": "d", "input_schema": SCHEMA}],
            "tool_choice": {"type": "tool", "name": "count", "disable_parallel_tool_use": True},
            "thinking": {"type": "enabled", "budget_tokens": 9},
            "max_tokens": 20,
            "metadata": {"user_id": "u"},
            "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
        },
    ),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_any_value_anywhere_in_a_request_is_read_or_rejected(path: str, body: dict[str, Any]) -> None:
    endpoint = ENDPOINTS[path]
    endpoint.parse(body, {"default": ""})
    errors = list[TandemError]()
    for place in places(body):
        for value in VALUES:
            try:
                endpoint.parse(changed(body, place, value), {"default": ""})
            except TandemError as error:
                errors.append(error)
    assert len(errors) > len(VALUES)
    assert all(json.dumps(endpoint.error(error), ensure_ascii=False).encode() for error in errors)


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": ["</a>", "b"]}
WORD = {"type": "regex", "pattern": "a+"}
SEVERAL = {"separator": ",", "at_least_one": True, "stop_after_first": False}
STRUCTURED: list[dict[str, Any]] = [
    *(
        {"structural_tag": {"type": "structural_tag", "format": form}}
        for form in (
            {"type": "triggered_tags", "triggers": ["<a"], "tags": [TAG], "excludes": ["x"], "at_least_one": True},
            {"type": "tags_with_separator", "tags": [TAG | {"begin": ""}], **SEVERAL},
            {
                "type": "sequence",
                "elements": [{"type": "const_string", "value": "a"}, {"type": "or", "elements": [WORD]}],
            },
        )
    ),
    {"structural_tag": {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]}},
    {"json": {"items": dict.fromkeys(KEYWORDS)}},
]


def test_any_value_anywhere_in_a_grammar_is_read_or_rejected() -> None:
    rejected = 0
    for structured in STRUCTURED:
        for at in places(structured):
            for value in VALUES[:6]:
                other = changed(structured, at, value)
                if at[:2] == ("json", "items"):  # one keyword at a time
                    other = {"json": {"items": {at[-1]: value}}}
                try:
                    read(StructuredOutputs(**other))
                except BadRequest:
                    rejected += 1
    assert rejected > 300

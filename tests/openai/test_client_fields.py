"""Fields that clients of OpenAI, Anthropic and vLLM send: absent where null, else with their effect or without one."""

from contextlib import closing
from typing import Any, get_type_hints

import openai
import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from tandemrt import LLM, SamplingParams
from tests.openai.client import Served, events

USER = {"role": "user", "content": "Two boxes."}
TOOL = {"name": "count", "parameters": {"type": "object"}}
VLLM = (
    *("include_reasoning", "request_id", "truncate_prompt_tokens", "documents", "add_special_tokens", "chat_template"),
    *("mm_processor_kwargs", "kv_transfer_params", "vllm_xargs", "echo", "guided_json", "structural_tag"),
)
MINIMAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/chat/completions": (ChatParams, {"messages": [USER], "max_tokens": 2}),
    "/v1/completions": (CompletionParams, {"prompt": "Two", "max_tokens": 2}),
    "/v1/responses": (ResponseCreateParamsNonStreaming, {"input": "Two boxes.", "max_output_tokens": 2}),
    "/v1/messages": (MessageCreateParamsNonStreaming, {"messages": [USER], "max_tokens": 2}),
}
NESTED: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [{**USER, "name": None, "weight": None}],
            "stream": True,
            "stream_options": {"include_usage": None, "include_obfuscation": None},
            "response_format": {"type": "text", "json_schema": None},
            "tools": [{"type": "function", "function": {**TOOL, "strict": None}, "cache_control": None}],
            "tool_choice": {"type": "function", "function": {"name": "count", "arguments": None}},
        },
    ),
    (
        "/v1/responses",
        {
            "input": [{**USER, "type": None, "phase": None, "extra": None}],
            "text": {"format": None, "verbosity": None},
            "reasoning": {"effort": None, "summary": None, "generate_summary": None},
            "tools": [{"type": "function", **TOOL, "defer_loading": None}],
            "tool_choice": "none",
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "x", "citations": None}], "id": None}],
            "tools": [{"name": "count", "input_schema": {"type": "object"}, "defer_loading": None}],
            "tool_choice": {"type": "none", "disable_parallel_tool_use": None},
            "output_config": {"effort": None, "format": None, "task_budget": None},
        },
    ),
]


@pytest.mark.parametrize("path", MINIMAL)
def test_every_null_field_counts_as_absent(served: Served, path: str) -> None:
    params, body = MINIMAL[path]
    nulls = dict.fromkeys([*get_type_hints(params), *VLLM, "no_such_field"])
    status, answer, _ = served.ask(path, {**nulls, **body})
    assert status == 200, answer


@pytest.mark.parametrize(("path", "fields"), NESTED)
def test_a_null_field_of_an_object_counts_as_absent(served: Served, path: str, fields: dict[str, Any]) -> None:
    status, answer, _ = served.ask(path, {**MINIMAL[path][1], **fields})
    assert status == 200, answer


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"verbosity": "low"}),
        ("/v1/responses", {"text": {"verbosity": "high"}}),
        *((path, {}) for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses")),
    ],
)
def test_fields_for_openais_own_servers_have_no_effect(served: Served, path: str, fields: dict[str, Any]) -> None:
    body = {**MINIMAL[path][1], "seed": 1}
    hints = {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "safety_identifier": "u"}
    (status, plain, _), (_, full, _) = served.ask(path, body), served.ask(path, {**body, **hints, **fields})
    assert status == 200
    assert text_of(full) == text_of(plain)


def text_of(answer: dict[str, Any]) -> Any:
    [first, *_] = answer.get("choices") or answer["output"]
    return first.get("message", first.get("text", first.get("content")))


@pytest.mark.parametrize("stream", [False, True])
def test_include_reasoning_false_leaves_only_the_reasoning_out(served: Served, llm: LLM, stream: bool) -> None:
    params = SamplingParams(seed=7, thinking_token_budget=5, max_tokens=24)
    expected = llm.generate([USER], params)
    body = {"messages": [USER], "seed": 7, "thinking_token_budget": 5, "max_tokens": 24, "include_reasoning": False}
    if stream:
        with closing(served.send("/v1/chat/completions", {**body, "stream": True})) as connection:
            chunks = list(events(connection.getresponse()))
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    else:
        deltas = [served.ask("/v1/chat/completions", body)[1]["choices"][0]["message"]]
    assert expected.reasoning
    assert "".join(delta.get("content", "") for delta in deltas) == expected.text != ""
    assert not {"reasoning", "reasoning_content"} & {name for delta in deltas for name in delta}


def test_a_response_has_the_id_of_its_request(served: Served) -> None:
    ids = {path: served.ask(path, {**MINIMAL[path][1], "request_id": "job-7"})[1]["id"] for path in list(MINIMAL)[:3]}
    assert list(ids.values()) == ["chatcmpl-job-7", "cmpl-job-7", "job-7"]


def test_documents_are_a_variable_of_the_template(client: openai.OpenAI) -> None:
    """The demo's template does not read it, and the response says so."""
    documents = [{"title": "a", "text": "b"}]
    answer = client.chat.completions.create(
        model="demo",
        messages=[USER],  # type: ignore[list-item]
        max_tokens=2,
        extra_body={"documents": documents, "chat_template_kwargs": {"documents": documents}},
    )
    assert "received 'documents'; it was ignored" in answer.warnings[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("kept", [1, 3, -1, 500])
@pytest.mark.parametrize("chat", [False, True])
def test_only_the_last_tokens_of_a_prompt_are_used(served: Served, llm: LLM, kept: int, chat: bool) -> None:
    prompt: Any = [{"role": "user", "content": "Two boxes of seven. " * 200}] if chat else "Two boxes of seven. " * 200
    tokens = llm.tokenize(prompt)
    assert len(tokens) > 512
    used = tokens[-(508 if kept == -1 else kept) :]
    body = {"messages": prompt} if chat else {"prompt": prompt}
    path = "/v1/chat/completions" if chat else "/v1/completions"
    asked = {"seed": 1, "max_tokens": 4, "ignore_eos": True, "return_token_ids": True, "truncate_prompt_tokens": kept}
    [choice] = served.ask(path, {**body, **asked})[1]["choices"]
    assert choice["prompt_token_ids"] == used
    assert choice["token_ids"] == llm.generate(used, SamplingParams(seed=1, max_tokens=4, ignore_eos=True)).token_ids


@pytest.mark.parametrize("kept", [0, -2, 2**63, True])
def test_a_number_of_tokens_out_of_range_is_rejected(served: Served, kept: Any) -> None:
    status, answer, _ = served.ask("/v1/completions", {"prompt": "Two", "truncate_prompt_tokens": kept})
    assert status == 400
    assert "truncate_prompt_tokens" in answer["error"]["message"]


ADDED_BY_ROUTERS = {  # vllm-router 0.1.17 and sglang-router 0.3.2 send these with every request
    "/v1/chat/completions": {
        "logprobs": False,
        "continue_final_message": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "include_reasoning": True,
    },
    "/v1/completions": {"echo": False},
}
ADDED_TO_BOTH = {
    "stream": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}


@pytest.mark.parametrize("path", ADDED_BY_ROUTERS)
def test_the_defaults_that_routers_add_change_nothing(served: Served, path: str) -> None:
    body = MINIMAL[path][1] | {"seed": 1}
    added = ADDED_BY_ROUTERS[path] | ADDED_TO_BOTH
    answers = [served.ask(path, body | more) for more in ({}, added)]
    assert [status for status, _, _ in answers] == [200, 200]
    plain, routed = (answer["choices"] for _, answer, _ in answers)
    assert plain == routed


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "no_stop_trim", True),
        ("/v1/completions", "return_hidden_states", True),
        ("/v1/chat/completions", "separate_reasoning", False),
        ("/v1/chat/completions", "stream_reasoning", False),
    ],
)
def test_other_values_of_these_fields_are_rejected(served: Served, path: str, field: str, value: bool) -> None:
    status, answer, _ = served.ask(path, MINIMAL[path][1] | {field: value})
    assert status == 400
    assert answer["error"]["param"] == field

"""/v1/messages to Anthropic's own client: the answers of a chat as blocks, complete and streamed."""

import re
from collections.abc import Iterator
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter

from tandemrt import LLM, Chat, SamplingParams
from tandemrt.runtime.servers.anthropic.content import as_messages
from tests.openai.client import EXAMPLES, Served, named_events
from tests.openai.test_answers import answer_of
from tests.openai.test_tools import COUNT, NESTED
from tests.waiting import PATIENCE_S

TOOLS: list[Any] = [
    {"name": "send", "description": "sends", "input_schema": NESTED},
    {"name": "count", "input_schema": COUNT, "strict": True, "cache_control": {"type": "ephemeral"}},
]


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[anthropic.Anthropic]:
    url = served.url.removesuffix("/v1")
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as opened_client:
        yield opened_client


def asked(example: Any, **more: Any) -> dict[str, Any]:
    wanted = {"format": {"type": "json_schema", "schema": example.schema}}
    return {
        "model": "demo",
        "max_tokens": 200,
        "messages": example.prompt_messages(),
        "output_config": wanted,
        "extra_body": {"seed": 7},
        **more,
    }


def blocks(message: Message) -> list[tuple[str, Any]]:
    fields = {"thinking": "thinking", "text": "text", "tool_use": "input"}
    return [(block.type, getattr(block, fields[block.type])) for block in message.content]


def test_a_message_equals_the_python_api(claude: anthropic.Anthropic, llm: LLM) -> None:
    expected = answer_of(llm, EXAMPLES[0], seed=7, max_tokens=200)
    message: Any = claude.messages.create(**asked(EXAMPLES[0]))
    assert blocks(message) == [("thinking", expected.reasoning), ("text", expected.text)]
    assert (message.stop_reason, message.stop_sequence, message.seed) == ("end_turn", None, 7)
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens == len(expected.prompt_token_ids)
    assert usage.cache_read_input_tokens == 64  # it was asked just before
    assert usage.output_tokens == len(expected.token_ids)
    assert usage.output_tokens_details.thinking_tokens == expected.reasoning_tokens > 0
    assert message.metrics["speculative_decoding"] == expected.speculation.to_json()


def test_a_stream_builds_the_same_message(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**asked(EXAMPLES[1]))
    with claude.messages.stream(**asked(EXAMPLES[1])) as stream:
        texts = list(stream.text_stream)
        message = stream.get_final_message()
    assert blocks(message) == blocks(whole)
    assert message.stop_reason == whole.stop_reason
    assert message.usage.output_tokens == whole.usage.output_tokens
    assert "".join(texts) == whole.content[-1].text  # type: ignore[union-attr]
    assert len(texts) > 3


def test_system_stop_sequences_and_sampling_parameters_have_their_effect(claude: anthropic.Anthropic, llm: LLM) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two boxes."}]
    params: dict[str, Any] = {"temperature": 0.5, "top_k": 5, "top_p": 0.9}
    expected = llm.generate(
        messages, SamplingParams(seed=3, stop=["e"], thinking_token_budget=3, max_tokens=60, **params)
    )
    message: Any = claude.messages.create(
        model="demo",
        system=[
            {"type": "text", "text": "Be "},
            {"type": "text", "text": "brief.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[{"role": "user", "content": [{"type": "text", "text": "Two "}, {"type": "text", "text": "boxes."}]}],
        stop_sequences=["e"],
        thinking={"type": "enabled", "budget_tokens": 3},
        metadata={"user_id": "me"},
        max_tokens=60,
        extra_body={"seed": 3, **params},
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "e")
    assert "".join(text for _, text in blocks(message)) == expected.reasoning + expected.text


def test_thinking_can_be_disabled_and_an_answer_begun(claude: anthropic.Anthropic, llm: LLM) -> None:
    messages: list[Any] = [{"role": "user", "content": "Two boxes."}, {"role": "assistant", "content": "We"}]
    chat = Chat(messages, chat_template_kwargs={"enable_thinking": False}, continue_final_message=True)
    expected = llm.generate(chat, SamplingParams(seed=7, max_tokens=9))
    message = claude.messages.create(
        model="demo", max_tokens=9, messages=messages, thinking={"type": "disabled"}, extra_body={"seed": 7}
    )
    assert blocks(message) == [("text", expected.text)]
    assert message.stop_reason == "max_tokens"
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) == len(expected.prompt_token_ids)


def test_a_variable_that_the_template_does_not_read_is_ignored_with_a_warning(claude: anthropic.Anthropic) -> None:
    plain: Any = claude.messages.create(**asked(EXAMPLES[0], max_tokens=8))
    fields = asked(EXAMPLES[0], max_tokens=8)
    fields["extra_body"] = {"seed": 7, "chat_template_kwargs": {"enable": 1}}
    warned: Any = claude.messages.create(**fields)
    expected = ["chat_template_kwargs: the chat template reads enable_thinking, received 'enable'; it was ignored"]
    assert (blocks(warned), warned.warnings) == (blocks(plain), expected)
    assert not hasattr(plain, "warnings")
    with claude.messages.stream(**fields) as stream:
        assert stream.get_final_message().model_extra["warnings"] == expected


@pytest.mark.parametrize(
    ("choice", "tokens"), [({"type": "any"}, 300), ({"type": "tool", "name": "send"}, 300), (None, 60)]
)
@pytest.mark.parametrize("seed", range(2))
def test_messages_and_events_match_anthropics_schema(served: Served, choice: Any, tokens: int, seed: int) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Two boxes."}], "seed": seed, "max_tokens": tokens}
    body |= {"thinking": {"type": "enabled", "budget_tokens": 9}}
    if choice is not None:
        body |= {"tools": TOOLS, "tool_choice": choice}
    status, message, _ = served.ask("/v1/messages", body)
    assert status == 200
    Message.model_validate(message, strict=True)
    events = named_events(served, "/v1/messages", body | {"stream": True})
    for name, event in events:
        TypeAdapter(RawMessageStreamEvent).validate_python(event, strict=True)
        assert name == event["type"]
    indices = [event["index"] for _, event in events if "index" in event]
    assert (indices, set(indices)) == (sorted(indices), set(range(len(message["content"]))))
    for name in ("content_block_start", "content_block_stop"):
        assert [event["index"] for each, event in events if each == name] == list(range(len(message["content"])))
    assert [name for name, _ in events[-2:]] == ["message_delta", "message_stop"]
    assert events[-2][1]["delta"]["stop_reason"] == message["stop_reason"]


def test_the_model_reads_every_call_and_every_result() -> None:
    used = [("tool_use", "1", "count", {"boxes": 2}), ("tool_use", "2", "send", {})]
    calls = [dict(zip(("type", "id", "name", "input"), each, strict=True)) for each in used]
    results = [
        {"type": "tool_result", "tool_use_id": "1", "content": "two"},
        {"type": "tool_result", "tool_use_id": "2"},
    ]
    said = [{"type": "thinking", "thinking": "first"}, {"type": "text", "text": "wait"}]
    messages = [
        {"role": "assistant", "content": said + calls},
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]
    functions = [{"name": "count", "arguments": '{"boxes": 2}'}, {"name": "send", "arguments": "{}"}]
    assert as_messages(messages) == [
        {
            "role": "assistant",
            "content": "wait",
            "reasoning_content": "first",
            "tool_calls": [
                {"id": "1", "type": "function", "function": functions[0]},
                {"id": "2", "type": "function", "function": functions[1]},
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "two"},
        {"role": "tool", "tool_call_id": "2", "content": ""},
        {"role": "user", "content": "go on"},
    ]


def test_texts_between_results_of_tools_keep_their_order() -> None:
    def result(name: str) -> dict[str, Any]:
        return {"type": "tool_result", "tool_use_id": name, "content": f"result {name}"}

    def text(content: str) -> dict[str, Any]:
        return {"type": "text", "text": content}

    content = [text("a"), text("b"), result("1"), text("c"), result("2"), result("3"), text("d")]
    assert [message["content"] for message in as_messages([{"role": "user", "content": content}])] == [
        "ab",
        "result 1",
        "c",
        "result 2",
        "result 3",
        "d",
    ]


def test_inputs_of_tools_obey_the_schema_and_their_results_go_back(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"model": "demo", "tools": TOOLS, "max_tokens": 100, "extra_body": {"seed": 1}}
    asked |= {"thinking": {"type": "enabled", "budget_tokens": 5}}
    messages: list[Any] = [{"role": "user", "content": "Two boxes."}]
    with claude.messages.stream(
        messages=messages, tool_choice={"type": "tool", "name": "count", "disable_parallel_tool_use": True}, **asked
    ) as stream:
        first = stream.get_final_message()
    whole = claude.messages.create(messages=messages, tool_choice={"type": "tool", "name": "count"}, **asked)
    call: Any = first.content[-1]
    assert blocks(first) == blocks(whole)
    assert (first.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "count")
    jsonschema.validate(call.input, COUNT)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "done", "is_error": False}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    second = claude.messages.create(messages=messages, tool_choice={"type": "none"}, **asked)
    assert "tool_use" not in [block.type for block in second.content]
    counted = claude.messages.count_tokens(model="demo", messages=messages, tool_choice={"type": "none"}, tools=TOOLS)
    assert counted.input_tokens == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"messages": []}, "messages", "must be a non-empty list"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages.0.role", "must be one of user, assistant, system"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0", "text only"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.source", "base64"),
        ({"messages": [{"role": "assistant", "content": [IMAGE]}]}, "messages.0.content.0", "must be a block of type"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages.0.content.0", "block of type"),
        ({"messages": [{"role": "user", "content": "x", "name": "a"}]}, "messages.0.name", "is no field"),
        ({"system": 7}, "system", "must be a text or a list of blocks"),
        ({"max_tokens": 0}, "max_tokens", "must be at least 1; got 0"),
        ({"stop": "x"}, "stop", "send stop_sequences"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "must come with type enabled"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "must come with type tool"),
        ({"tools": [{"name": "a", "type": "bash_20250124", "input_schema": {}}]}, "tools.0.type", "custom"),
        ({"logprobs": 2}, "logprobs", "is not supported"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages", "prompt is too long: "),
    ],
)
def test_a_wrong_field_is_named_in_anthropics_form(
    served: Served, fields: dict[str, Any], param: str, message: str
) -> None:
    status, body, _ = served.ask("/v1/messages", {"messages": [{"role": "user", "content": "x"}], **fields})
    assert (status, body["type"], body["error"]["type"]) == (400, "error", "invalid_request_error")
    assert body["error"]["param"] == param
    assert message in body["error"]["message"]


def test_context_management_that_keeps_all_thinking_is_taken_without_effect(served: Served) -> None:
    """Claude Code sends it with every request."""
    body = {"model": "demo", "max_tokens": 9, "messages": [{"role": "user", "content": "Two boxes."}], "seed": 7}
    plain = served.ask("/v1/messages", body)[1]
    edit = {"type": "clear_thinking_20251015", "keep": "all"}
    status, answer, _ = served.ask("/v1/messages", {**body, "context_management": {"edits": [edit]}})
    assert (status, answer["content"]) == (200, plain["content"])
    status, answer, _ = served.ask("/v1/messages", {**body, "context_management": {"edits": [{**edit, "keep": 1}]}})
    assert (status, answer["error"]["param"]) == (400, "context_management")


def test_other_fields_of_claude_code_have_no_effect(served: Served) -> None:
    body = {"max_tokens": 9, "messages": [{"role": "user", "content": "Two boxes."}], "seed": 7, "system": "x"}
    plain = served.ask("/v1/messages", body)[1]
    tools = [{**TOOLS[0], "defer_loading": True, "eager_input_streaming": True}]
    control = {"type": "ephemeral", "ttl": "1h", "scope": "global"}
    body |= {"system": [{"type": "text", "text": "x", "cache_control": control}], "diagnostics": {"a": None}}
    status, answer, _ = served.ask("/v1/messages", {**body, "tools": tools, "tool_choice": {"type": "none"}})
    assert (status, answer["content"]) == (200, plain["content"])


@pytest.mark.parametrize("content", ["", []])
def test_a_message_without_content_is_an_empty_one(served: Served, content: Any) -> None:
    messages = [{"role": "user", "content": content}]
    assert as_messages(messages) == [{"role": "user", "content": ""}]
    assert served.ask("/v1/messages", {"messages": messages, "max_tokens": 1})[0] == 200


def test_a_result_that_refers_to_tools_names_them() -> None:
    references = [{"type": "tool_reference", "tool_name": name} for name in ("count", "send")]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [*references, {"type": "text", "text": "."}]}
    assert as_messages([{"role": "user", "content": [result]}])[0]["content"] == "count\nsend\n."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": [{"role": "user", "content": "a b " * 600}]}, r"prompt is too long: \d{4} tokens > 511 maximum"),
        ({"messages": [{"role": "user", "content": "a" * 10**6}]}, r"prompt is too long: 2048 tokens > 511 maximum"),
        (
            {"max_tokens": 512},
            r"input length and `max_tokens` exceed context limit: \d+ \+ 512 > 512, decrease input length or "
            r"`max_tokens` and try again",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_beyond_the_context_has_anthropics_message(
    served: Served, fields: dict[str, Any], message: str, stream: bool
) -> None:
    """Claude Code reads the numbers of these messages to shorten a chat or the output that it asks for."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": stream, **fields}
    status, answer, _ = served.ask("/v1/messages", body)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert re.fullmatch(message, answer["error"]["message"])


def test_errors_have_the_classes_of_anthropics_client(claude: anthropic.Anthropic) -> None:
    asked: dict[str, Any] = {"max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(anthropic.NotFoundError, match="must be one of demo, received 'other'"):
        claude.messages.create(model="other", **asked)
    with pytest.raises(anthropic.BadRequestError, match="metadata: unknown key 'user'"):
        claude.messages.create(model="demo", metadata={"user": "me"}, **asked)  # type: ignore[typeddict-unknown-key]

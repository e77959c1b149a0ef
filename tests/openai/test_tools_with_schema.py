"""Tools and an output schema in one request: the answer is calls, or obeys the schema, in every protocol."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.openai.client import Served, events, named_events
from tests.openai.conftest import serving
from tests.openai.test_tools import COUNT, NESTED
from tools.demo.tokenizer import CHAT_TEMPLATE

BEGIN = "<tool_call>"
ANSWER = {
    "type": "object",
    "properties": {"boxes": {"enum": [1, 2, 3]}, "note": {"const": f"{BEGIN} is no call"}},
    "required": ["boxes", "note"],
    "additionalProperties": False,
}
TOOLS = {"send": NESTED, "count": COUNT}
COMMON = {"seed": 3, "thinking_token_budget": 0, "repetition_penalty": 50}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


def calling_template() -> str:
    """Return the demo's chat template with calls as Hermes and Qwen write them."""
    call = (
        '{% for c in message.tool_calls %}{{ \'<tool_call>\\n{"name": "\' ~ c.function.name ~ \'", "arguments": \' }}'
        "{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{{ '\\n' if not loop.last }}{% endfor %}"
    )
    either = f" }}}}{{% if message.tool_calls %}}{call}{{% else %}}{{{{- message.content }}}}{{% endif %}}{{{{- '"
    return CHAT_TEMPLATE.replace(" + message.content + '", either)


@pytest.fixture(scope="module")
def calling(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose chat template writes calls."""
    template = tmp_path_factory.mktemp("calling") / "chat.jinja"
    template.write_text(calling_template())
    with serving(demo_bundle, ServerConfig(port=0), RuntimeOptions(threads=1, chat_template=str(template))) as running:
        yield running


def body_of(path: str, choice: str, bias: dict[str, int]) -> dict[str, Any]:
    """Return a request with tools and a schema, in the form of the endpoint."""
    message = {"role": "user", "content": "Two boxes."}
    own: dict[str, Any]
    if path == CHAT:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}
        tools = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in TOOLS.items()]
        named = {"type": "function", "function": {"name": "count"}}
        own = {"messages": [message], "response_format": form, "max_tokens": 300}
    elif path == RESPONSES:
        own = {"input": "Two boxes.", "max_output_tokens": 300}
        own["text"] = {"format": {"type": "json_schema", "name": "answer", "schema": ANSWER}}
        tools = [{"type": "function", "name": name, "parameters": each} for name, each in TOOLS.items()]
        named = {"type": "function", "name": "count"}
    else:
        own = {"messages": [message], "max_tokens": 300}
        own["output_config"] = {"format": {"type": "json_schema", "schema": ANSWER}}
        tools = [{"name": name, "input_schema": each} for name, each in TOOLS.items()]
        named = {"type": "tool", "name": "count"}
    words: Any = {"auto": "auto", "required": "required", "named": named}[choice]
    if path == MESSAGES:
        words = words if choice == "named" else {"type": {"auto": "auto", "required": "any"}[choice]}
    return {**own, **COMMON, "tools": tools, "tool_choice": words, "logit_bias": bias}


def parts(path: str, answer: dict[str, Any]) -> tuple[list[str], list[tuple[str, Any]]]:
    """Return the texts and the calls of a complete answer."""
    if path == CHAT:
        message = answer["choices"][0]["message"]
        called = [each["function"] for each in message.get("tool_calls", ())]
        texts = [message["content"]] if message["content"] is not None else []
        return texts, [(each["name"], json.loads(each["arguments"])) for each in called]
    if path == RESPONSES:
        texts = [item["content"][0]["text"] for item in answer["output"] if item["type"] == "message"]
        called = [item for item in answer["output"] if item["type"] == "function_call"]
        return texts, [(each["name"], json.loads(each["arguments"])) for each in called]
    blocks = answer["content"]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    return texts, [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]


def streamed(path: str, served: Served, body: dict[str, Any]) -> tuple[list[str], list[tuple[str, Any]]]:
    if path == CHAT:
        connection = served.send(path, {**body, "stream": True})
        deltas = [chunk["choices"][0]["delta"] for chunk in events(connection.getresponse())]
        connection.close()
        text, calls = "".join(delta.get("content", "") for delta in deltas), list[list[str]]()
        for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
            if "id" in call:
                calls.append([call["function"]["name"], ""])
            calls[-1][1] += call["function"]["arguments"]
        return [text] if text else [], [(name, json.loads(arguments)) for name, arguments in calls]
    stream = named_events(served, path, {**body, "stream": True})
    if path == RESPONSES:
        return parts(path, stream[-1][1]["response"])
    blocks: list[dict[str, Any]] = []
    for _, event in stream:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"] | {"json": ""})
        elif event["type"] == "content_block_delta":
            blocks[-1]["text"] = blocks[-1].get("text", "") + event["delta"].get("text", "")
            blocks[-1]["json"] += event["delta"].get("partial_json", "")
    for block in blocks:
        block["input"] = json.loads(block["json"] or "{}")
    return parts(path, {"content": blocks})


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    ("choice", "begin", "called"),
    [("auto", "{", False), ("auto", "<", True), ("required", "{", True), ("named", "{", True)],
)
def test_an_answer_is_calls_or_obeys_the_schema(
    calling: Served, path: str, choice: str, begin: str, called: bool
) -> None:
    """The model is made to like the beginning of one of the two."""
    [liked, *_] = calling.llm.tokenizer.encode(begin, add_special_tokens=False)
    body = body_of(path, choice, {str(liked): 100})
    status, answer, _ = calling.ask(path, body)
    assert status == 200, answer
    texts, calls = parts(path, answer)
    assert (len(texts), bool(calls)) == (0, True) if called else (1, False)
    for text in texts:
        jsonschema.validate(json.loads(text), ANSWER)
    for name, arguments in calls:
        jsonschema.validate(arguments, TOOLS[name])
    if choice == "named":
        assert {name for name, _ in calls} == {"count"}
    assert streamed(path, calling, body) == (texts, calls)
    plain = parts(path, calling.ask(path, {**body, "num_draft_tokens": 0})[1])
    assert plain == (texts, calls)


def test_pydantic_ai_gets_an_object_from_an_agent_with_a_tool(calling: Served) -> None:
    """It sends the tool and the output type in one request."""

    class Order(BaseModel):
        kind: Literal["order"]
        customer: str
        currency: Literal["EUR", "USD", "GBP"]

    def stock(item: str) -> str:
        """Return how many pieces of an item there are."""
        return f"3 of {item}"

    async def ask() -> Order:
        async with openai.AsyncOpenAI(base_url=calling.url, api_key="none", max_retries=0) as client:
            model = OpenAIChatModel("demo", provider=OpenAIProvider(openai_client=client))
            agent = Agent(model, output_type=NativeOutput(Order), tools=[stock], model_settings={"temperature": 0})
            return (await agent.run("Please put 1 pine box at £26.55 on the account of Leo Conti.")).output

    assert asyncio.run(ask()) == Order(kind="order", customer="Leo Conti", currency="GBP")


def test_a_keyword_that_cannot_be_enforced_is_named(calling: Served) -> None:
    body = body_of(CHAT, "auto", {})
    unlisted = {"type": "array", "items": {"type": "integer"}, "contains": {"const": 1}}
    body["response_format"]["json_schema"]["schema"] = {"type": "object", "properties": {"a": unlisted}}
    status, answer, _ = calling.ask(CHAT, body)
    assert (status, answer["error"]["param"]) == (400, "response_format")
    assert "contains" in answer["error"]["message"]


@pytest.fixture(scope="module")
def calling_in_json(demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server whose chat template writes a call as Llama 3.1 does."""
    call = (
        '{{ \'{"name": "\' ~ message.tool_calls[0].function.name ~ \'", "parameters": \' }}'
        "{{ message.tool_calls[0].function.arguments | tojson }}{{ '}' }}"
    )
    either = f" }}}}{{% if message.tool_calls %}}{call}{{% else %}}{{{{- message.content }}}}{{% endif %}}{{{{- '"
    template = tmp_path_factory.mktemp("calling") / "chat.jinja"
    template.write_text(CHAT_TEMPLATE.replace(" + message.content + '", either))
    with serving(demo_bundle, ServerConfig(port=0), RuntimeOptions(threads=1, chat_template=str(template))) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "response_format"), (RESPONSES, "text"), (MESSAGES, "output_config")]
)
def test_a_schema_is_rejected_if_its_answers_begin_like_calls(calling_in_json: Served, path: str, field: str) -> None:
    status, answer, _ = calling_in_json.ask(path, body_of(path, "auto", {}))
    assert status == 400, answer
    assert answer["error"]["param"].startswith(field)
    assert "this model writes calls that begin with {" in answer["error"]["message"]
    status, answer, _ = calling_in_json.ask(path, body_of(path, "named", {}))
    assert status == 200, answer

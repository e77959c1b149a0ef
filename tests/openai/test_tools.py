"""Tool calls: arguments obey the function's schema, with and without streaming."""

import asyncio
import json
from collections.abc import Iterator
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tandemrt import LLM, SamplingParams, StructuredOutputs
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.servers.http.config import ServerConfig
from tests.openai.client import EXAMPLES, Served, events
from tests.openai.conftest import serving
from tools.demo.tokenizer import CHAT_TEMPLATE

NESTED = {
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/place"}, "by": {"$ref": "#/$defs/place"}},
    "required": ["to", "by"],
    "additionalProperties": False,
    "$defs": {"place": {"enum": ["here", 'there, "quoted" ]}']}},
}
LISTED = {"type": "object", "properties": {"a": {"type": "array", "contains": {"const": 1}}}}
COUNT = {
    "type": "object",
    "properties": {"$ref": {"enum": [1, 2, 3]}},
    "required": ["$ref"],
    "additionalProperties": False,
}


def tool(name: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
    described = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, "description": "does it", **described}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def calls(answer: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in answer.choices[0].message.tool_calls]


def test_arguments_of_a_named_function_obey_its_schema(client: openai.OpenAI, llm: LLM) -> None:
    example = EXAMPLES[0]
    expected = llm.generate(
        example.prompt_messages(), SamplingParams(seed=7, structured_outputs=StructuredOutputs(json=example.schema))
    )
    answer = client.chat.completions.create(
        model="demo",
        messages=example.prompt_messages(),
        seed=7,
        tools=[tool("other"), tool(example.kind, example.schema)],
        tool_choice=named(example.kind),
    )
    assert calls(answer) == [(example.kind, expected.text)]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert answer.choices[0].message.reasoning == expected.reasoning


def test_required_arguments_equal_those_of_a_named_function(client: openai.OpenAI) -> None:
    """The model may use the layout that it was trained on, whichever way the function is chosen."""
    example = EXAMPLES[0]
    tools: Any = [tool("other"), tool(example.kind, example.schema)]
    asked: dict[str, Any] = {"model": "demo", "messages": example.prompt_messages(), "seed": 7, "temperature": 0}
    choices: Any = (named(example.kind), "required")
    alone, listed = (client.chat.completions.create(tools=tools, tool_choice=each, **asked) for each in choices)
    assert calls(listed) == calls(alone) == [(example.kind, example.record)]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("parallel", [True, False])
def test_required_calls_are_valid_with_and_without_streaming(client: openai.OpenAI, seed: int, parallel: bool) -> None:
    asked: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Two boxes."}],
        "seed": seed,
        "temperature": 2.0,
        "tools": [tool("send", NESTED), tool("count", COUNT)],
        "tool_choice": "required",
        "parallel_tool_calls": parallel,
        "extra_body": {"thinking_token_budget": 0},
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason in ("tool_calls", "length")
    if whole.choices[0].finish_reason == "tool_calls":
        for name, arguments in calls(whole):
            jsonschema.validate(json.loads(arguments), {"send": NESTED, "count": COUNT}[name])
    if not parallel:
        assert len(calls(whole)) == 1
    streamed: list[list[str]] = []
    for chunk in client.chat.completions.create(**asked, stream=True):
        for delta in chunk.choices[0].delta.tool_calls or []:
            if delta.id is not None:
                assert delta.index == len(streamed)
                streamed.append([delta.function.name, ""])
            streamed[delta.index][1] += delta.function.arguments
    assert [tuple(each) for each in streamed] == calls(whole)


def test_function_results_are_accepted_as_messages(client: openai.OpenAI) -> None:
    tools = [tool("count", COUNT)]
    messages: list[Any] = [{"role": "user", "content": "Two boxes."}]
    asked: dict[str, Any] = {"model": "demo", "tools": tools, "seed": 1, "extra_body": {"thinking_token_budget": 0}}
    first = client.chat.completions.create(messages=messages, tool_choice=named("count"), **asked)
    message = first.choices[0].message
    messages += [message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "done"}]
    second = client.chat.completions.create(messages=messages, tool_choice="none", max_tokens=8, **asked)
    assert second.choices[0].message.tool_calls is None
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_pydantic_ai_gets_an_object(served: Served) -> None:
    class Size(BaseModel):
        boxes: int
        fragile: bool

    async def ask() -> Size:
        async with openai.AsyncOpenAI(base_url=served.url, api_key="none", max_retries=0) as client:
            model = OpenAIChatModel("demo", provider=OpenAIProvider(openai_client=client))
            settings: Any = {"seed": 1, "extra_body": {"thinking_token_budget": 0}}
            return (await Agent(model, output_type=Size, model_settings=settings).run("Two boxes.")).output

    assert isinstance(asyncio.run(ask()), Size)


@pytest.mark.parametrize("choice", ["any", "Size"])
@pytest.mark.parametrize("responses", [False, True])
def test_langchain_binds_tools(served: Served, choice: str, responses: bool) -> None:
    class Size(BaseModel):
        """The size of an order."""

        boxes: int
        fragile: bool

    more: dict[str, Any] = {"extra_body": {"seed": 1, "thinking_token_budget": 0}, "use_responses_api": responses}
    model = ChatOpenAI(model="demo", base_url=served.url, api_key=SecretStr("none"), max_retries=0, **more)
    bound = model.bind_tools([Size], tool_choice=choice, parallel_tool_calls=False)
    message = bound.invoke("Two boxes.")
    assert isinstance(message, AIMessage)
    [call] = message.tool_calls
    assert call["name"] == "Size"
    Size.model_validate(call["args"], strict=True)
    joined = reduce(add, bound.stream("Two boxes."))
    assert [(each["name"], each["args"]) for each in joined.tool_calls] == [("Size", call["args"])]
    result = ToolMessage("done", tool_call_id=call["id"])
    again = model.bind_tools([Size], tool_choice="none").invoke([HumanMessage("Two boxes."), message, result])
    assert again.tool_calls == []


CALLS = {  # what an answer with a call is, by how the call begins: as Llama writes it, in JSON or in Python
    '{"name": "': """{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}""",
    "[send(": "{{- '[' + call.name + '(' }}{% for key, value in call.arguments.items() %}"
    "{{- key + '=' + value | tojson }}{{- ', ' if not loop.last }}{% endfor %}{{- ')]' }}",
}


@pytest.fixture(scope="module", params=CALLS)
def choosing(
    request: pytest.FixtureRequest, demo_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Served, str]]:
    """The demo with a template that writes calls, and how a call begins."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    call = "{% if message.tool_calls %}{% set call = message.tool_calls[0].function %}" + CALLS[request.param]
    template.write_text(
        CHAT_TEMPLATE.replace(
            " + message.content + '", f" }}}}{call}{{% else %}}{{{{- message.content }}}}{{% endif %}}{{{{- '"
        )
    )
    with serving(demo_bundle, ServerConfig(port=0), RuntimeOptions(threads=1, chat_template=str(template))) as running:
        yield running, request.param


@pytest.mark.parametrize("seed", range(2))
def test_an_automatic_call_is_valid(choosing: tuple[Served, str], seed: int) -> None:
    """It is made to like what a call begins with, each token once; what is in the call is held."""
    served, begin = choosing
    liked = served.llm.tokenizer.encode(begin, add_special_tokens=False)
    bias = {str(token): 100 - 20 * at for at, token in enumerate(liked)}
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Two boxes."}],
        "seed": seed,
        "max_tokens": 200,
        "tools": [tool("send", NESTED), *([tool("count", COUNT)] if begin[0] == "{" else [])],
        "logit_bias": bias,
        "repetition_penalty": 50,
        "thinking_token_budget": 0,
        "logprobs": True,
    }
    whole = served.ask("/v1/chat/completions", asked)[1]
    choice = whole["choices"][0]
    [call] = choice["message"]["tool_calls"]
    schema = {"send": NESTED, "count": COUNT}[call["function"]["name"]]
    jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    assert choice["finish_reason"] == "tool_calls"
    plain = served.ask("/v1/chat/completions", asked | {"num_draft_tokens": 0})[1]["choices"][0]
    for said in (call, plain["message"]["tool_calls"][0]):
        del said["id"]
    assert (plain["message"], plain["logprobs"]) == (choice["message"], choice["logprobs"])

    text, calls, logprobs = "", list[list[str]](), list[Any]()
    connection = served.send("/v1/chat/completions", asked | {"stream": True})
    for chunk in (chunk["choices"][0] for chunk in events(connection.getresponse())):
        text += chunk["delta"].get("content", "")
        logprobs += (chunk["logprobs"] or {"content": []})["content"]
        for delta in chunk["delta"].get("tool_calls", ()):
            if "id" in delta:
                calls.append([delta["function"]["name"], ""])
            calls[delta["index"]][1] += delta["function"]["arguments"]
    connection.close()
    assert (text or None, calls) == (choice["message"]["content"], [list(call["function"].values())])
    assert logprobs == choice["logprobs"]["content"]


def test_automatic_tool_choice_allows_text_alone(choosing: tuple[Served, str]) -> None:
    served, _ = choosing
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Two boxes."}], "seed": 1, "max_tokens": 20}
    asked["thinking_token_budget"] = 0
    chosen = served.ask("/v1/chat/completions", asked | {"tools": [tool("send", NESTED)]})[1]["choices"][0]
    assert "tool_calls" not in chosen["message"]
    assert chosen["message"]["content"]
    status, body, _ = served.ask(
        "/v1/chat/completions", asked | {"tools": [tool("a")], "structured_outputs": {"regex": "a"}}
    )
    assert (status, body["error"]["param"]) == (400, "structured_outputs")
    assert "with tools must be json or json_object" in body["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": [tool("a")]}, "tool_choice: auto .* needs a supported tool call format"),
        ({"tools": [tool("a")], "tool_choice": "auto"}, "tool_choice: auto .* chat template shows none"),
        ({"tools": [tool("a")], "tool_choice": named("b")}, "tool_choice: must name one of the tools, a, received 'b'"),
        ({"tools": [tool("a"), tool("a")], "tool_choice": "required"}, "tools: .* received 'a' twice"),
        ({"tools": [tool("a b")], "tool_choice": "required"}, "tools.0.function.name: must match"),
        ({"tool_choice": "required"}, "tool_choice: must come with tools"),
        ({"tools": [tool("a", {"type": "string"})], "tool_choice": "required"}, "tools: .*type object"),
        (
            {"tools": [tool("a", LISTED)], "tool_choice": "required"},
            "tools: .*#/properties/a/contains: .* is not supported",
        ),
        ({"tools": [tool("a", {"type": 7})], "tool_choice": named("a")}, "tools: .*received 7"),
        ({"tools": 3, "tool_choice": "required"}, "tools: must be a (valid )?list"),
        (
            {"tools": [tool("a")], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
            "structured_outputs: with tools must be json or json_object",
        ),
    ],
)
def test_tools_that_cannot_be_enforced_are_refused(served: Served, fields: dict[str, Any], message: str) -> None:
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, **fields}
    status, body, _ = served.ask("/v1/chat/completions", chat)
    assert status == 400
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(body["error"]["message"].replace("\n", " "))

"""/tokenize and /detokenize: the tokens that a completion reads, and their text."""

from typing import Any

import pytest

from tandemrt import LLM, Chat
from tandemrt.runtime.servers.openai.tokenization import TokenizeFields, _prompt
from tests.openai.client import EXAMPLES, Served

MESSAGES = EXAMPLES[0].prompt_messages()


def read_by_a_completion(served: Served, path: str, fields: dict[str, Any]) -> list[int]:
    body = served.ask(f"/v1/{path}", {**fields, "max_tokens": 1, "return_token_ids": True})[1]
    ids: list[int] = body["choices"][0]["prompt_token_ids"]
    return ids


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": "Please send 2 boxes."}),
        ("chat/completions", {"messages": MESSAGES}),
        ("chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"enable_thinking": False}}),
        ("chat/completions", {"messages": MESSAGES, "add_generation_prompt": False}),
    ],
)
def test_tokens_are_those_that_a_completion_reads(served: Served, llm: LLM, path: str, fields: dict[str, Any]) -> None:
    expected = read_by_a_completion(served, path, fields)
    status, body, _ = served.ask("/tokenize", {"model": "demo", **fields, "return_token_strs": True})
    assert (status, body["tokens"], body["count"], body["max_model_len"]) == (200, expected, len(expected), 512)
    assert body["token_strs"] == [llm.tokenizer.backend.id_to_token(each) for each in expected]
    assert served.ask("/tokenize", fields)[1]["token_strs"] is None
    status, text, _ = served.ask("/detokenize", {"tokens": expected})
    assert (status, llm.tokenizer.encode(text["prompt"], add_special_tokens=False)) == (200, expected)
    if "prompt" in fields:
        assert text == {"prompt": fields["prompt"]}


def test_the_template_reads_the_tools_of_a_chat() -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in "ab"]
    prompt = _prompt(TokenizeFields.model_validate({"messages": MESSAGES, "tools": tools}))
    assert isinstance(prompt, Chat)
    assert (prompt.messages, list(prompt.tools)) == (MESSAGES, tools)


def test_a_variable_that_the_template_does_not_read_is_ignored_with_a_warning(served: Served) -> None:
    plain = served.ask("/tokenize", {"messages": MESSAGES})[1]
    status, body, _ = served.ask("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"enable": False}})
    [warning] = body.pop("warnings")
    assert (status, body) == (200, plain)
    assert "reads enable_thinking, received 'enable'" in warning


def test_a_text_longer_than_the_engine_is_counted(served: Served) -> None:
    status, body, _ = served.ask("/tokenize", {"prompt": "a b " * 600, "add_special_tokens": False})
    assert (status, body["count"]) == (200, 1200 + 1)
    assert len(body["tokens"]) == body["count"] > body["max_model_len"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
        ("/tokenize", {"prompt": "a" * 10**6}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1] * 513}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/tokenize", {"prompt": "x", "model": "gpt"}, "model"),
    ],
)
def test_an_invalid_field_is_named(served: Served, path: str, fields: dict[str, Any], param: str) -> None:
    status, body, _ = served.ask(path, fields)
    assert (status, body["error"]["param"]) == (404 if param == "model" else 400, param)

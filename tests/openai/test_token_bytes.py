"""Logprobs of tokens that are parts of characters, and of echoed prompts, as lm-eval reads them."""

from contextlib import closing
from itertools import pairwise
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams
from tests.openai.client import Served, events

TEXT = "ab😀é日本"
PROMPT = "Please send 日本 two boxes 😀."


def text_of(values: list[Any]) -> bytes:
    return b"".join(bytes(value["bytes"]) for value in values)


WRITING = {"structured_outputs": {"choice": [TEXT]}, "seed": 1, "thinking_token_budget": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_a_chats_tokens_join_to_the_text(served: Served, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5, **WRITING}
    if stream:
        with closing(served.send("/v1/chat/completions", {**body, "stream": True})) as connection:
            choices = [chunk["choices"][0] for chunk in events(connection.getresponse())]
        values = [value for choice in choices for value in (choice["logprobs"] or {"content": []})["content"]]
    else:
        values = served.ask("/v1/chat/completions", body)[1]["choices"][0]["logprobs"]["content"]
    assert text_of(values) == TEXT.encode()
    parts = [value for value in values if value["token"].startswith("bytes:")]
    assert parts
    assert all(value["token"] == "bytes:" + "".join(f"\\x{byte:02x}" for byte in value["bytes"]) for value in parts)


def test_a_completion_lists_every_alternative(served: Served, llm: LLM) -> None:
    """Parts of characters are alternatives of each other here: no two have the same key."""
    body = {"prompt": "x", "logprobs": 20, "max_tokens": 8, "ignore_eos": True, "seed": 1, "logprobs_mode": "raw"}
    choice = served.ask("/v1/completions", body)[1]["choices"][0]
    expected = llm.generate(
        "x", SamplingParams(logprobs=20, max_tokens=8, ignore_eos=True, seed=1, logprobs_mode="raw")
    ).logprobs
    assert expected is not None
    assert [list(top.values()) for top in choice["logprobs"]["top_logprobs"]] == [
        [logprob for _, logprob in each.top] for each in expected
    ]


@pytest.mark.parametrize("as_ids", [False, True])
@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_begins_with_those_of_the_prompt(
    served: Served, llm: LLM, most: int, as_ids: bool, stream: bool
) -> None:
    ids = llm.tokenize(PROMPT)
    params = SamplingParams(
        temperature=0, max_tokens=max(1, most), logprobs=2, prompt_logprobs=2, seed=1, ignore_eos=True
    )
    expected = llm.generate(ids, params)
    body = {"prompt": ids if as_ids else PROMPT, "echo": True, "logprobs": 2, "max_tokens": most, "temperature": 0}
    body |= {"seed": 1, "ignore_eos": True, "return_token_ids": True, "stream": stream}
    if stream:
        with closing(served.send("/v1/completions", body)) as connection:
            [choice] = [chunk["choices"][0] for chunk in events(connection.getresponse())]
    else:
        status, answer, _ = served.ask("/v1/completions", body)
        assert status == 200, answer
        [choice] = answer["choices"]
        assert answer["usage"]["completion_tokens"] == most
    logprobs = choice["logprobs"]
    output = (expected.logprobs or []) if most else []
    scores = [each.logprob for each in (*(expected.prompt_logprobs or ()), *output)]
    assert logprobs["token_logprobs"] == [None, *scores]
    assert logprobs["top_logprobs"][0] is None
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"]) == len(ids) + most
    assert choice["token_ids"] == (expected.token_ids if most else [])
    assert choice["text"] == PROMPT + (expected.text if most else "")
    assert choice["finish_reason"] == "length"
    for (at, following), token in zip(pairwise(logprobs["text_offset"]), logprobs["tokens"], strict=False):
        if not token.startswith("bytes:"):
            assert choice["text"][at:following] == token
    assert "prompt_logprobs" not in choice


def test_max_tokens_0_needs_echo(served: Served) -> None:
    status, answer, _ = served.ask("/v1/completions", {"prompt": "x", "max_tokens": 0})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")

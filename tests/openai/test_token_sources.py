"""``stream_options.include_token_sources``: where the tokens of a stream came from, as in a trace."""

from typing import Any

import pytest

from tests.openai.client import EXAMPLES, Served, asking, endless, events

SOURCES = {"accepted", "corrected", "bonus", "undrafted", "grammar", "delimiter", "budget"}


def streamed(served: Served, path: str, body: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """The choices of all chunks."""
    connection = served.send(path, {**body, "stream": True, "stream_options": options})
    try:
        return [choice for event in events(connection.getresponse()) for choice in event["choices"]]
    finally:
        connection.close()


def sources(choices: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [token for choice in choices if choice["index"] == index for token in choice.get("token_sources", ())]


def test_a_chat_says_where_every_token_came_from(served: Served) -> None:
    body = asking(EXAMPLES[0], seed=3, thinking_token_budget=4, return_token_ids=True)
    choices = streamed(served, "/v1/chat/completions", body, include_token_sources=True)
    tokens = sources(choices)
    assert [token["id"] for token in tokens] == [at for choice in choices for at in choice.get("token_ids", ())]
    for role, name in (("reasoning", "reasoning"), ("answer", "content")):
        written = "".join(choice["delta"].get(name, "") for choice in choices)
        assert "".join(token["text"] for token in tokens if token["role"] == role) == written != ""
    assert {token["source"] for token in tokens} <= SOURCES
    assert {"accepted", "grammar", "budget"} <= {token["source"] for token in tokens}
    assert all(token["allowed"] == 1 for token in tokens if token["source"] in ("grammar", "budget"))


def test_sources_change_no_token_and_are_sent_only_when_asked_for(served: Served) -> None:
    body = asking(EXAMPLES[1], seed=4, return_token_ids=True)
    asked, plain = (
        streamed(served, "/v1/chat/completions", body, **options) for options in ({"include_token_sources": True}, {})
    )
    ids = [[at for choice in choices for at in choice.get("token_ids", ())] for choices in (asked, plain)]
    assert ids[0] == ids[1]
    assert sources(plain) == []


def test_reasoning_that_is_left_out_has_no_sources(served: Served) -> None:
    body = asking(EXAMPLES[0], seed=3, include_reasoning=False)
    choices = streamed(served, "/v1/chat/completions", body, include_token_sources=True)
    written = "".join(choice["delta"].get("content", "") for choice in choices)
    assert "".join(token["text"] for token in sources(choices)) == written != ""


def test_every_choice_of_every_prompt_has_its_own_sources(served: Served) -> None:
    body = endless(prompt=["Please send", "Two boxes"], n=2, max_tokens=12, return_token_ids=True)
    choices = streamed(served, "/v1/completions", body, include_token_sources=True)
    for index in range(4):
        own = [choice for choice in choices if choice["index"] == index]
        assert [token["id"] for token in sources(choices, index)] == [at for e in own for at in e["token_ids"]]
        assert "".join(token["text"] for token in sources(choices, index)) == "".join(e["text"] for e in own)


@pytest.mark.parametrize("stream", [{}, {"stream": False}])
def test_sources_need_a_stream(served: Served, stream: dict[str, Any]) -> None:
    body = endless(stream_options={"include_token_sources": True}, **stream)
    status, answer, _ = served.ask("/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "stream_options")

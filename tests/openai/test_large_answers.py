"""Large answers: bounded before they are generated, formatted without delaying others, counted until they are read."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.requests import request_size
from tandemrt.runtime.servers.http import rendering, streaming
from tandemrt.runtime.servers.http.config import ServerConfig
from tandemrt.runtime.servers.http.rendering import json_pieces
from tests.openai.client import Served, events, post_head
from tests.openai.conftest import serving
from tests.openai.test_connections import held_bytes, port_of
from tests.waiting import PATIENCE_S, eventually

CHOSEN = {"ignore_eos": True, "seed": 1, "thinking_token_budget": 0}
MAX_ANSWER = 50_000


@pytest.fixture(scope="module")
def small(demo_bundle: Path) -> Iterator[Served]:
    config = ServerConfig(port=0, max_body=1 << 20, max_bodies=2 << 20, max_answer=MAX_ANSWER, grace_s=10)
    with serving(demo_bundle, config, RuntimeOptions(threads=1)) as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["x"] * 8, "logprobs": 20, "max_tokens": 4}, "logprobs"),
        ({"prompt": "x", "n": 8, "logprobs": 20, "max_tokens": 4}, "logprobs"),
        ({"prompt": "x", "n": 7, "logprobs": 20, "max_tokens": 4}, None),
        ({"prompt": "x", "logprobs": 20, "max_tokens": 30}, "logprobs"),
        ({"prompt": "x", "logprobs": 20, "max_tokens": 29}, None),
        ({"prompt": "x", "logprobs": 20, "max_tokens": 200, "stream": True}, None),
        ({"prompt": [[70] * 200] * 2, "prompt_logprobs": 1, "max_tokens": 1}, "prompt_logprobs"),
        ({"prompt": [[70] * 150] * 2, "prompt_logprobs": 1, "max_tokens": 1}, None),
        ({"prompt": [70] * 400, "n": 18, "return_token_ids": True, "max_tokens": 1}, "return_token_ids"),
        ({"prompt": [70] * 400, "n": 17, "return_token_ids": True, "max_tokens": 1}, None),
        ({"prompt": "x" * 400, "n": 126, "echo": True, "max_tokens": 1}, "echo"),
        ({"prompt": "x" * 400, "n": 124, "echo": True, "max_tokens": 1}, None),
    ],
)
def test_the_size_of_an_answer_is_bounded(small: Served, fields: dict[str, Any], param: str | None) -> None:
    status, body, _ = small.ask("/v1/completions", {**CHOSEN, **fields})
    if param is None:
        assert status == 200
        return
    assert (status, body["error"]["param"]) == (400, param)
    assert f"at most {MAX_ANSWER} bytes besides its texts (--max-answer)" in body["error"]["message"]
    assert eventually(lambda: small.llm.running == small.llm.waiting == 0)


@pytest.mark.parametrize("top", [None, 0, 20])
def test_a_whole_answer_without_max_tokens_is_refused_if_it_is_too_large(small: Served, top: int | None) -> None:
    """Its size is not known before."""
    logprobs = {} if top is None else {"logprobs": True, "top_logprobs": top}
    message = [{"role": "user", "content": "x"}]
    status, body, _ = small.ask("/v1/chat/completions", {**CHOSEN, "messages": message, **logprobs})
    if top != 20:
        assert status == 200
        return
    assert (status, body["error"]["param"]) == (400, "logprobs")
    assert f"at most {MAX_ANSWER} bytes besides its texts (--max-answer)" in body["error"]["message"]
    assert "ask for fewer outputs, tokens by max_tokens, or a stream" in body["error"]["message"]
    assert eventually(lambda: small.llm.running == small.llm.waiting == 0)


def test_a_limit_holds_for_all_prompts_together(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_size, "MAX_PROMPT_LOGPROBS", 4 * 10 * 3)
    fields = {**CHOSEN, "max_tokens": 1, "prompt_logprobs": 2}
    assert served.ask("/v1/completions", {**fields, "prompt": [[70] * 10] * 4})[0] == 200
    status, body, _ = served.ask("/v1/completions", {**fields, "prompt": [[70] * 10] * 5})
    assert (status, body["error"]["param"]) == (400, "prompt_logprobs")
    assert "at most 120, received 150;" in body["error"]["message"]
    assert eventually(lambda: served.llm.running == served.llm.waiting == 0)


def test_logprobs_of_several_prompts_are_bounded_together(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_size, "MAX_LOGPROBS", 3 * 5 * 2)
    fields = {**CHOSEN, "max_tokens": 5, "logprobs": 1}
    assert served.ask("/v1/completions", {**fields, "prompt": ["x"] * 3})[0] == 200
    status, body, _ = served.ask("/v1/completions", {**fields, "prompt": ["x"] * 4})
    assert (status, body["error"]["param"]) == (400, "n")


LARGE = [
    ("/v1/completions", {"prompt": "Two boxes.", "n": 4, "max_tokens": 60, "logprobs": 20, "return_token_ids": True}),
    ("/v1/completions", {"prompt": ["Two boxes."] * 2, "max_tokens": 2, "prompt_logprobs": 20, "echo": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 90, "logprobs": True}),
    ("/v1/responses", {"input": "x", "instructions": "é" * 50, "max_output_tokens": 30}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "fields"), LARGE)
def test_a_large_answer_is_formatted_outside_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], stream: bool
) -> None:
    """Its JSON is that of a small one; everything is large or small here."""
    threads: set[str] = set()

    def recorded(encode: Callable[[Any], str]) -> Callable[[Any], str]:
        def encoded(value: Any) -> str:
            threads.add(threading.current_thread().name)
            return encode(value)

        return encoded

    for name in ("_encode_answer", "encode_event"):
        monkeypatch.setattr(rendering, name, recorded(getattr(rendering, name)))
    answers = []
    for small, thread in ((1 << 30, "server"), (-1, "tandemrt-writer")):
        monkeypatch.setattr(rendering, "SMALL", small)
        threads.clear()
        with closing(served.send(path, {**CHOSEN, **fields, "stream": stream})) as connection:
            response = connection.getresponse()
            assert response.status == 200
            answers.append(_content(response.read().decode(), stream))
        assert {name.split("_")[0] for name in threads} == {thread}
    assert answers[0] == answers[1]


def _content(text: str, stream: bool) -> Any:
    """The texts and logprobs of an answer. Streams are compared by their last events only: they are cut anywhere."""
    if stream:
        *_, last = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: {")]
        return [choice["finish_reason"] for choice in last.get("choices", ())], last.get("type")
    answer = json.loads(text)
    choices = [{**choice, "seed": None} for choice in answer.get("choices", ())]
    items = [item["content"] for item in answer.get("output", ())]
    return choices, items, answer.get("content")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@given(VALUES, st.integers(0, 4), st.integers(0, 200))
def test_pieces_of_json_are_its_text(value: Any, levels: int, size: int) -> None:
    for each in (value, [value] * size, {"choices": [{"logprobs": {"content": [value] * size}}]}):
        assert json.loads("".join(json_pieces(each, json.dumps, levels))) == each


def test_one_piece_of_json_is_short() -> None:
    entries = [{"token": "x", "logprob": -1.0}] * 10_000
    answer = {"choices": [{"logprobs": {"content": entries}}, {"prompt_logprobs": entries}]}
    assert max(map(len, json_pieces(answer, json.dumps))) < 5000


def test_an_unread_answer_counts_until_its_client_has_taken_it(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "PART", 1000)
    listener = small.server.servers[0].sockets[0]
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of new connections
    body = json.dumps({**CHOSEN, "prompt": "x", "logprobs": 20, "max_tokens": 29}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        slow.settimeout(PATIENCE_S)
        slow.connect(("127.0.0.1", port_of(small)))
        slow.sendall(post_head(len(body)) + body)
        assert slow.recv(12) == b"HTTP/1.1 200"
        assert eventually(lambda: held_bytes(small) > 10_000)
        while held_bytes(small) and slow.recv(1 << 16):
            pass
        assert eventually(lambda: held_bytes(small) == 0)  # the server may count after the last byte arrived
    assert small.ask("/health")[0] == 200


def test_an_answer_larger_than_a_clients_share_is_sent(small: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    app: Any = small.server.config.app
    while not isinstance(app, FastAPI):
        app = app._app
    monkeypatch.setattr(app.state.bodies, "most_per_client", 10_000)
    for stream in (False, True):
        fields = {**CHOSEN, "prompt": "x", "logprobs": 20, "max_tokens": 29, "stream": stream}
        status, answer, _ = small.ask("/v1/completions", fields)
        assert (status, len(json.dumps(answer)) > 10_000) == (200, True)
        assert "overloaded" not in json.dumps(answer)


def test_an_unread_stream_counts_until_its_client_has_taken_it(small: Served) -> None:
    """Its last event holds the logprobs of the prompt."""
    fields = {**CHOSEN, "prompt": [70] * 300, "prompt_logprobs": 1, "max_tokens": 1, "stream": True}
    with closing(small.send("/v1/completions", fields)) as connection:
        last = [*events(connection.getresponse())][-1]
    assert len(last["choices"][0]["prompt_logprobs"]) == 300
    assert eventually(lambda: held_bytes(small) == 0)

"""Hostile clients: a stream of another client completes, and their resources are freed."""

import json
import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

from tests.openai.client import EXAMPLES, Served, asking, events, post_head
from tests.waiting import eventually


def raw(served: Served) -> socket.socket:
    parts = urlsplit(served.url)
    assert parts.hostname is not None
    assert parts.port is not None
    return socket.create_connection((parts.hostname, parts.port))


def test_a_stream_is_complete_while_hostile_clients_are_served(served: Served) -> None:
    alone = served.ask("/v1/chat/completions", asking(EXAMPLES[5], seed=1))[1]["choices"][0]["message"]["content"]
    with ExitStack() as stack:
        victim = served.send("/v1/chat/completions", asking(EXAMPLES[5], seed=1, stream=True, user="victim"))
        stack.callback(victim.close)
        for _ in range(20):  # slow writers: a head without an end, a body without an end
            for beginning in (
                b"POST /v1/comp",
                post_head(99) + b"{",
            ):
                connection = stack.enter_context(raw(served))
                connection.sendall(beginning)
        for sent in (b"\x16\x03\x01\x02\x00\x01", b"\xff\xfe" * 500 + b"\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b""):
            for _ in range(50):  # opened and closed
                with raw(served) as connection:
                    connection.sendall(sent)
        many = {"messages": [{"role": "user", "content": "x"}] * 10_000}
        status, body, _ = served.ask("/v1/chat/completions", many)
        assert (status, body["error"]["param"]) == (400, "messages")
        deltas = [chunk["choices"][0]["delta"] for chunk in events(victim.getresponse())]
        assert "".join(delta.get("content", "") for delta in deltas) == alone
    assert served.ask("/health")[0] == 200


def test_dropped_streams_free_their_resources(served: Served) -> None:
    body = json.dumps({"prompt": "x", "ignore_eos": True, "stream": True, "max_tokens": 200}).encode()
    head = post_head(len(body))
    before = served.metrics()
    for _ in range(40):
        with raw(served) as connection:
            connection.sendall(head + body)
    assert eventually(lambda: served.llm.running == served.llm.waiting == 0)
    after = served.metrics()
    ended = {name: after[name] - before.get(name, 0) for name in after if name.startswith("tandemrt_finished_total")}
    assert sum(ended.values()) == ended.get("tandemrt_finished_total cancelled", 0) + ended.get(
        "tandemrt_finished_total length", 0
    )
    assert served.ask("/v1/completions", {"prompt": "x", "max_tokens": 3})[0] == 200

"""HTTP client of the tests, in addition to OpenAI's own: plain requests, streams and /metrics."""

import http.client
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families

from tandemrt import LLM
from tandemrt.runtime.servers.http.server import Server
from tests.waiting import PATIENCE_S
from tools.demo.corpus import Example, held_out

EXAMPLES = held_out(16)


@dataclass(frozen=True)
class Served:
    """A running server: the address that clients take, the first bundle that it has open, and all of them by name."""

    url: str
    llm: LLM
    server: Server
    llms: Mapping[str, LLM] = field(default_factory=dict)

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        return http.client.HTTPConnection(parts.hostname, parts.port, timeout=PATIENCE_S)

    def send(
        self, path: str, body: Any = None, *, method: str | None = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPConnection:
        """Send a request and leave its answer to come; a body that is no bytes is sent as JSON."""
        connection = self.connect()
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method or ("GET" if body is None else "POST"), path, data, {**kind, **(headers or {})})
        return connection

    def ask(self, path: str, body: Any = None, **more: Any) -> tuple[int, Any, dict[str, str]]:
        """Status, answer and headers."""
        connection = self.send(path, body, **more)
        try:
            answer = connection.getresponse()
            data = answer.read()
            kind = answer.headers.get("content-type", "")
            return (
                answer.status,
                json.loads(data) if "json" in kind else data.decode(errors="replace"),
                dict(answer.headers),
            )
        finally:
            connection.close()

    def metrics(self, **more: Any) -> dict[str, float]:
        """Every number at /metrics by name, with the label that tells series of a name apart."""
        _, text, _ = self.ask("/metrics", **more)
        return {
            sample.name
            + "".join(
                f" {value}" for label, value in sample.labels.items() if label not in ("model", "model_name")
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def post_head(length: int | None, path: str = "/v1/completions") -> bytes:
    """The head of a request with JSON of ``length`` bytes; None: in chunks."""
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    kind = "Content-Type: application/json"
    return f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{kind}\r\n{framing}\r\n\r\n".encode()


def events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    """The events of a stream as they come, up to its end."""
    for line in answer:
        if line == b"data: [DONE]\n":
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise EOFError("the stream has no end")


def named_events(served: Served, path: str, body: Any) -> list[tuple[str, Any]]:
    """All events of a stream whose events have names."""
    connection = served.send(path, body)
    try:
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events


def asking(example: Example, **more: Any) -> dict[str, Any]:
    """The fields that ask for an example's record."""
    schema = {"type": "json_schema", "json_schema": {"name": example.kind, "schema": example.schema}}
    return {"model": "demo", "messages": example.prompt_messages(), "response_format": schema, **more}


def endless(**more: Any) -> dict[str, Any]:
    """The fields of a request to /v1/completions that runs to the engine's length."""
    return {"model": "demo", "prompt": "Please send", "ignore_eos": True, "seed": 1, **more}

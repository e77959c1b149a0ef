"""The HTTP clients of the tools, against a server with canned responses."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from tools.clients.openai import Completion, OpenAIServer
from tools.clients.triton import TritonClient, TritonResponse

PARTS = [
    {"text_output": "a", "reasoning_output": "r", "token_ids": [5, 6], "finish_reason": ""},
    {"text_output": "b", "reasoning_output": "", "token_ids": 7, "finish_reason": "stop"},
]
DELTAS = [{"choices": [{"delta": {"content": text}}]} for text in ("a", None, "b")]
USAGE = {"choices": [], "usage": {"completion_tokens": 3}}
MESSAGE = {"choices": [{"message": {"content": "ab"}}], "usage": {"completion_tokens": 3}}


class Server(ThreadingHTTPServer):
    daemon_threads = False  # closing waits for them, and so for their sockets


class Canned(BaseHTTPRequestHandler):
    """Answers a request for "fail" with an error, and others with the objects above, as events if streamed."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        chat = self.path == "/v1/chat/completions"
        if "fail" in body:
            events = [{"error": "failed"}]
        elif chat:
            events = [*DELTAS, USAGE] if body["stream"] else [MESSAGE]
        else:
            assert self.path.endswith("generate_stream" if body["stream"] else "generate")
            events = PARTS if body["stream"] else PARTS[1:]
        self.send_response(200)
        self.end_headers()
        for each in events:
            line = json.dumps(each)
            self.wfile.write((f"data: {line}\n\n" if body["stream"] else line).encode())
        if chat and body["stream"]:
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with Server(("127.0.0.1", 0), Canned) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_triton_responses_are_joined(port: int) -> None:
    client = TritonClient(SimpleNamespace(http=port))
    assert client.generate({}, stream=True) == TritonResponse("ab", "r", [5, 6, 7], "stop")
    assert client.generate({}, stream=False) == TritonResponse("b", "", [7], "stop")
    client.hang_up({})


def test_chat_completions_are_joined(port: int) -> None:
    server = OpenAIServer(port, 0)
    assert server.chat({}, stream=True) == server.chat({}, stream=False) == Completion("ab", 3)


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_server_is_raised(port: int, stream: bool) -> None:
    for request in (TritonClient(SimpleNamespace(http=port)).generate, OpenAIServer(port, 0).chat):
        with pytest.raises(ValueError, match="failed"):
            request({"fail": True}, stream=stream)

"""Where an attack goes, and where its victim's stream comes from: the Python API, and ``tandemrt serve``."""

import http.client
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from tandemrt.engines.errors import TandemError
from tandemrt.engines.params import SamplingParams
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.requests.outputs import RequestOutput, StreamOutput
from tools.attack.requests import Fields, body
from tools.bench_openai import server

VICTIM: dict[str, Any] = {"prompt": "x", "ignore_eos": True, "max_tokens": 300, "seed": 1}


class Face(Protocol):
    """One way to ask. ``pid`` is the process that does the work."""

    name: str
    pid: int

    def send(self, fields: Fields) -> str:
        """Ask once and wait for the end; return how it ended: the finish reason, or what was refused."""

    def stream(self) -> Iterator[float]:
        """The victim's stream: when each of its pieces came, in seconds of ``time.perf_counter``."""


class PythonApi:
    """Threads of this process, as they would stand behind a server of somebody's own."""

    name = "Python API"

    def __init__(self, llm: LLM, pid: int) -> None:
        self._llm = llm
        self.pid = pid

    def send(self, fields: Fields) -> str:
        asked = dict(fields)
        prompt = asked.pop("messages", None) or asked.pop("prompt")
        ended = threading.Event()
        heard: list[RequestOutput] = []

        def listen(item: StreamOutput) -> None:
            if item.output is not None:
                heard.append(item.output)
                ended.set()

        try:
            self._llm.submit(prompt, SamplingParams(**asked), listen, client="attacker")
        except TandemError as error:
            return _refused(str(error))
        ended.wait()
        reason = heard[0].error
        return heard[0].finish_reason if reason is None else _refused(reason)

    def stream(self) -> Iterator[float]:
        said: SimpleQueue[tuple[float, bool]] = SimpleQueue()

        def listen(item: StreamOutput) -> None:
            said.put((time.perf_counter(), item.output is not None))

        asked = dict(VICTIM)
        self._llm.submit(asked.pop("prompt"), SamplingParams(**asked), listen, client="victim")
        last = False
        while not last:
            at, last = said.get()
            yield at


class Http:
    """Clients of ``tandemrt serve``, over loopback."""

    name = "tandemrt serve"

    def __init__(self, port: int, pid: int) -> None:
        self.port = port
        self.pid = pid

    def send(self, fields: Fields) -> str:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        return self.post(path, body({**fields, "user": "attacker"}))

    def post(self, path: str, data: bytes) -> str:
        """Send a body as it is; return how it ended."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", path, data)
            answer = json.loads(connection.getresponse().read())
        except (BrokenPipeError, ConnectionResetError):
            return "refused: the connection was closed"
        finally:
            connection.close()
        return _refused(answer["error"]["message"]) if "error" in answer else str(answer["choices"][0]["finish_reason"])

    def stream(self) -> Iterator[float]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        try:
            connection.request("POST", "/v1/completions", json.dumps({**VICTIM, "stream": True, "user": "victim"}))
            for line in connection.getresponse():
                if line.startswith(b"data: {"):
                    yield time.perf_counter()
        finally:
            connection.close()


@contextmanager
def python_api(bundle: Path) -> Iterator[PythonApi]:
    """Open the bundle here."""
    with LLM(bundle, threads=1) as llm:
        yield PythonApi(llm, os.getpid())


@contextmanager
def serve(bundle: Path) -> Iterator[Http]:
    """Start a server on a free port."""
    with server(bundle, threads=1, clients=64) as (port, pid):
        yield Http(port, pid)


def _refused(message: str) -> str:
    return f"refused: {message}"

"""The interfaces that are attacked and that the victim streams from: the Python API and ``tandemrt serve``."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import TandemError
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import RequestOutput, StreamOutput
from tandemrt.runtime.workers.clients import Client
from tools.clients.http import Body, post
from tools.clients.openai import openai_server
from tools.quality.attack.requests import Fields
from tools.quality.attack.victim import VICTIM

REFUSED = "refused: "


class Frontend(Protocol):
    """An interface to send requests to. ``pid`` is the process that runs the engines of ``bundle``."""

    name: str
    pid: int
    bundle: Path

    def send(self, fields: Fields) -> str:
        """Send a request and wait for its end; return the finish reason, or "refused: " and the message."""

    def stream(self) -> Iterator[float]:
        """Stream the victim's request; yield the arrival time of each part, in seconds of ``time.perf_counter``."""


class PythonFrontend:
    """The Python API in this process, called from several threads."""

    name = "Python API"

    def __init__(self, llm: LLM, pid: int) -> None:
        self._llm = llm
        self.pid = pid
        self.bundle = llm.bundle.folder

    def send(self, fields: Fields) -> str:
        params = dict(fields)
        prompt = params.pop("messages", None) or params.pop("prompt")
        ended: SimpleQueue[RequestOutput] = SimpleQueue()

        def listen(item: StreamOutput) -> None:
            if item.output is not None:
                ended.put(item.output)

        try:
            self._llm.submit(prompt, SamplingParams(**params), listen, client=Client("attacker"))
        except TandemError as error:
            return refused(str(error))
        outputs = [ended.get() for _ in range(params.get("n", 1))]
        errors = [output.error for output in outputs if output.error is not None]
        return refused(errors[0]) if errors else outputs[0].finish_reason

    def stream(self) -> Iterator[float]:
        arrivals: SimpleQueue[tuple[float, bool]] = SimpleQueue()

        def listen(item: StreamOutput) -> None:
            arrivals.put((time.perf_counter(), item.output is not None))

        params = dict(VICTIM)
        self._llm.submit(params.pop("prompt"), SamplingParams(**params), listen, client=Client("victim"))
        last = False
        while not last:
            at, last = arrivals.get()
            yield at


class HttpFrontend:
    """``tandemrt serve`` on ``port`` of this machine."""

    name = "tandemrt serve"

    def __init__(self, port: int, pid: int, bundle: Path) -> None:
        self.port = port
        self.pid = pid
        self.bundle = bundle

    def send(self, fields: Fields) -> str:
        path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
        return self.post(path, {**fields, "user": "attacker"})

    def post(self, path: str, body: Body) -> str:
        """Send ``body``; return as ``send`` does."""
        try:
            answer = json.loads(post(self.port, path, body))
        except (BrokenPipeError, ConnectionResetError):
            return refused("the connection was closed")
        return refused(answer["error"]["message"]) if "error" in answer else str(answer["choices"][0]["finish_reason"])

    def stream(self) -> Iterator[float]:
        """Stream from a process of its own: in this one it would wait for the attackers."""
        command = [sys.executable, "-m", "tools.quality.attack.victim", str(self.port)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            yield from map(float, process.stdout)


@contextmanager
def python_frontend(bundle: Path) -> Iterator[PythonFrontend]:
    """Open a copy of the bundle in this process."""
    with copied(bundle) as copy, LLM(copy, threads=1) as llm:
        yield PythonFrontend(llm, os.getpid())


@contextmanager
def http_frontend(bundle: Path) -> Iterator[HttpFrontend]:
    """Serve a copy of the bundle on a free port."""
    options = ("--salt-cache-by", "address")
    with copied(bundle) as copy, openai_server(copy, threads=1, clients=64, options=options) as server:
        yield HttpFrontend(server.port, server.pid, copy)


@contextmanager
def copied(bundle: Path) -> Iterator[Path]:
    """A copy of the bundle that attacks may damage."""
    with tempfile.TemporaryDirectory(prefix="tandemrt-attack-") as folder:
        yield Path(shutil.copytree(bundle, Path(folder, "bundle")))


def refused(message: str) -> str:
    return f"{REFUSED}{message}"

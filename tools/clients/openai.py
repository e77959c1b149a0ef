"""A ``tandemrt serve`` process, and requests to its OpenAI endpoints."""

import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tools.clients.http import MIN_QUEUE_LIMIT, events, post


class Completion(NamedTuple):
    """The text of a chat completion, and the number of its tokens."""

    text: str
    tokens: int


class OpenAIServer(NamedTuple):
    """The port and the process id of a running server."""

    port: int
    pid: int

    def chat(self, fields: Mapping[str, Any], *, stream: bool) -> Completion:
        """Request a chat completion. Raises ValueError if the server answers with an error."""
        body = {**fields, "stream": stream, **({"stream_options": {"include_usage": True}} if stream else {})}
        answers = events(post(self.port, "/v1/chat/completions", body))
        if errors := [answer for answer in answers if "error" in answer]:
            raise ValueError(str(errors)[:200])
        choices = [choice for answer in answers for choice in answer["choices"]]
        texts = [(choice["delta"] if stream else choice["message"]).get("content") or "" for choice in choices]
        return Completion("".join(texts), answers[-1]["usage"]["completion_tokens"])


@contextmanager
def openai_server(
    bundle: Path, *, threads: int | None, clients: int, options: Sequence[str] = ()
) -> Iterator[OpenAIServer]:
    """Run ``tandemrt serve`` with ``options`` on a free port until the block ends.

    Raises RuntimeError if it does not start.
    """
    command = [sys.executable, "-c", "from tandemrt.cli import main; main()", "serve", str(bundle), "--port", "0"]
    command += ["--queue-limit", str(max(clients, MIN_QUEUE_LIMIT)), *options]
    command += [] if threads is None else ["--threads", str(threads)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = re.search(r":(\d+)/v1", process.stdout.readline())
            if address is None:
                raise RuntimeError(f"{bundle}: tandemrt serve did not start; its messages are above")
            yield OpenAIServer(int(address[1]), process.pid)
        finally:
            process.terminate()

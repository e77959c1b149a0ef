"""Throughput of ``tandemrt serve`` against the Python API, in one run on one machine.

python -m tools.bench_openai engines/built/demo --requests 256 --concurrency 64
"""

import http.client
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tandemrt.runtime.llm import LLM
from tools.bench_serve import Measured, python_api, report, served
from tools.demo.corpus import Example, held_out


def main(
    bundle: Annotated[Path, typer.Argument(help="The demo's bundle.")],
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 256,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Clients at once; each asks again when it was answered.")
    ] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs each way; the best counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per engine.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as well.")] = None,
) -> None:
    """Answer held-out sentences through the Python API and through the server, and compare."""
    examples = held_out(requests)
    with server(bundle, threads, concurrency) as (port, _), LLM(bundle, threads=threads) as llm:
        ways: dict[str, Callable[[], Measured]] = {
            "Python API": lambda: python_api(llm, examples),
            "HTTP": lambda: served(partial(_ask, port, stream=False), examples, concurrency),
            "HTTP stream": lambda: served(partial(_ask, port, stream=True), examples, concurrency),
        }
        for run in ways.values():  # the first run compiles grammars
            run()
        runs = [{name: run() for name, run in ways.items()} for _ in range(repeats)]  # in turn: the machine may change
    report(runs, requests, concurrency, out)


@contextmanager
def server(bundle: Path, threads: int | None, clients: int) -> Iterator[tuple[int, int]]:
    """Run ``tandemrt serve`` in a process of its own; gives its port and the id of the process."""
    command = [sys.executable, "-c", "from tandemrt.cli import main; main()", "serve", str(bundle), "--port", "0"]
    command += ["--queue-limit", str(max(clients, 256))] + ([] if threads is None else ["--threads", str(threads)])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r":(\d+)/v1", process.stdout.readline())
            if found is None:
                raise typer.Exit(1)
            yield int(found[1]), process.pid
        finally:
            process.terminate()


def _ask(port: int, example: Example, *, stream: bool) -> tuple[int, str | None]:
    """Tokens and text of one answer; None for an error."""
    body = {
        "messages": example.prompt_messages(),
        "structured_outputs": {"json": example.schema},
        "temperature": 0.0,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        data = connection.getresponse().read()
    finally:
        connection.close()
    lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: {")] if stream else [data]
    answers = [json.loads(line) for line in lines]
    if any("error" in answer for answer in answers):
        return 0, None
    choices = [choice for answer in answers for choice in answer["choices"]]
    texts = [(choice["delta"] if stream else choice["message"]).get("content") or "" for choice in choices]
    return answers[-1]["usage"]["completion_tokens"], "".join(texts)


if __name__ == "__main__":
    typer.run(main)

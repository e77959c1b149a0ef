"""Compare the throughput of a server with the Python API, in one run on one machine.

Each way answers the same held-out sentences of the demo with their JSON schemas at temperature 0. Runs of the ways
alternate, because the speed of a machine may change.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tandemrt.runtime.llm.llm import LLM
from tools.bench.report import Json, Report, Row
from tools.bench.serving.ways import Run, requests_by_way, run_clients, run_python
from tools.clients.http import MIN_QUEUE_LIMIT
from tools.clients.openai import OpenAIServer, openai_server
from tools.clients.triton import TritonClient, triton_server
from tools.demo.corpus import held_out
from tools.serve import stop_on_signals

PYTHON = "Python API"
_COLUMNS = {"": "", "tokens/s": ".0f", "requests/s": ".1f", "ratio": ".2f", "errors": "d", "same text": ""}


class Server(StrEnum):
    OPENAI = "openai"
    TRITON = "triton"


def compare(
    server: Annotated[Server, typer.Argument(help="The server to measure.")],
    bundle: Annotated[Path, typer.Argument(help="The demo's bundle.")],
    requests: Annotated[int, typer.Option(min=1, help="Number of requests.")] = 128,
    concurrency: Annotated[int, typer.Option(min=1, help="Concurrent clients; each sends one request at a time.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs of each way; the best counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per engine.")] = None,
    out: Json = None,
) -> None:
    """Compare a server with the Python API."""
    stop_on_signals()
    examples = held_out(requests)
    with _opened(server, bundle, threads, concurrency) as served, LLM(bundle, threads=threads) as llm:
        ways: dict[str, Callable[[], Run]] = {PYTHON: lambda: run_python(llm, examples)}
        for name, request in requests_by_way(served).items():
            ways[name] = partial(run_clients, request, examples, concurrency)
        for run in ways.values():  # the first run compiles grammars
            run()
        runs = [{name: run() for name, run in ways.items()} for _ in range(repeats)]
    best = {name: min((each[name] for each in runs), key=lambda run: run.seconds) for name in ways}
    rows = [_row(name, run, best[PYTHON]) for name, run in best.items()]
    Report(out).add(f"{requests} requests, {concurrency} concurrent clients, best of {repeats}", _COLUMNS, rows)


def _opened(
    server: Server, bundle: Path, threads: int | None, clients: int
) -> AbstractContextManager[OpenAIServer | TritonClient]:
    if server is Server.OPENAI:
        return openai_server(bundle, threads=threads, clients=clients)
    return triton_server(bundle, threads=threads, queue_limit=max(clients, MIN_QUEUE_LIMIT))


def _row(name: str, run: Run, python: Run) -> Row:
    """Return the figures of a way next to those of the Python API."""
    same = sum(ours == theirs for ours, theirs in zip(run.texts, python.texts, strict=True))
    ratio = run.tokens_per_second / python.tokens_per_second
    rate = len(run.texts) / run.seconds
    return name, run.tokens_per_second, rate, ratio, run.errors, f"{same} of {len(run.texts)}"

"""Throughput of the served demo against the Python API, in one run on one machine.

python -m tools.bench_serve engines/built/demo --requests 128 --concurrency 32
"""

import http.client
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.params import SamplingParams, StructuredOutputs
from tandemrt.export.triton.repository import write_model
from tandemrt.runtime.llm import LLM
from tools.demo.corpus import Example, held_out
from tools.serve import TritonServer, stop_on_signals

MODEL = "measured"


@dataclass(frozen=True)
class Measured:
    """One way to answer all sentences."""

    seconds: float
    tokens: int
    errors: int
    texts: list[str | None]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def main(
    bundle: Annotated[Path, typer.Argument(help="The demo's bundle.")],
    requests: Annotated[int, typer.Option(min=1, help="How many requests.")] = 128,
    concurrency: Annotated[
        int, typer.Option(min=1, help="Clients at once; each asks again when it was answered.")
    ] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs each way; the best counts.")] = 3,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads per engine.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as well.")] = None,
) -> None:
    """Answer held-out sentences through the Python API and through the server, and compare."""
    stop_on_signals()
    examples = held_out(requests)
    with _server(bundle, threads, concurrency) as server, LLM(bundle, threads=threads) as llm:
        ways: dict[str, Callable[[], Measured]] = {
            "Python API": lambda: python_api(llm, examples),
            "HTTP generate": lambda: served(partial(_ask, server, stream=False), examples, concurrency),
            "HTTP stream": lambda: served(partial(_ask, server, stream=True), examples, concurrency),
        }
        for run in ways.values():  # the first run compiles grammars
            run()
        runs = [{name: run() for name, run in ways.items()} for _ in range(repeats)]  # in turn: the machine may change
    report(runs, requests, concurrency, out)


@contextmanager
def _server(bundle: Path, threads: int | None, clients: int) -> Iterator[TritonServer]:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Bundle.open(bundle), Path(folder), name=MODEL, threads=threads, queue_limit=max(clients, 256))
        with TritonServer(Path(folder)) as server:
            yield server


def report(runs: list[dict[str, Measured]], requests: int, concurrency: int, out: Path | None) -> None:
    """Show the best run of each way beside the Python API's, and write it to ``out``."""
    rows = {name: min((each[name] for each in runs), key=lambda measured: measured.seconds) for name in runs[0]}
    python = rows["Python API"]
    console = Console()
    table = Table("", "tokens/s", "requests/s", "ratio", "errors", "same text", show_edge=False)
    for name, way in rows.items():
        same = sum(mine == theirs for mine, theirs in zip(way.texts, python.texts, strict=True))
        table.add_row(
            name,
            f"{way.tokens_per_second:.0f}",
            f"{requests / way.seconds:.1f}",
            f"{way.tokens_per_second / python.tokens_per_second:.2f}",
            str(way.errors),
            f"{same} of {requests}",
        )
    console.print(table)
    console.print(f"{requests} requests, {concurrency} clients at once, best of {len(runs)}")
    if out is not None:
        figures = {name: {**asdict(way), "tokens_per_second": way.tokens_per_second} for name, way in rows.items()}
        out.write_text(json.dumps({"requests": requests, "concurrency": concurrency, **figures}, indent=2) + "\n")


def python_api(llm: LLM, examples: list[Example]) -> Measured:
    """Answer all sentences with one call of ``generate``."""
    params = [SamplingParams(temperature=0.0, structured_outputs=StructuredOutputs(json=e.schema)) for e in examples]
    prompts: list[Any] = [example.prompt_messages() for example in examples]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    return Measured(
        time.perf_counter() - start,
        sum(len(output.token_ids) for output in outputs),
        sum(output.finish_reason == "error" for output in outputs),
        [output.text for output in outputs],
    )


def served(ask: Callable[[Example], tuple[int, str | None]], examples: list[Example], clients: int) -> Measured:
    """Have ``clients`` at a time answered; ``ask`` returns tokens and text of one answer, None for an error."""
    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        answers = list(pool.map(ask, examples))
    return Measured(
        time.perf_counter() - start,
        sum(tokens for tokens, _ in answers),
        sum(text is None for _, text in answers),
        [text for _, text in answers],
    )


def _ask(server: TritonServer, example: Example, *, stream: bool) -> tuple[int, str | None]:
    """Tokens and text of one answer; None for an error."""
    body = {
        "messages": json.dumps(example.prompt_messages()),
        "structured_outputs": json.dumps({"json": example.schema}),
        "temperature": 0.0,
        "stream": stream,
    }
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=600)
    try:
        endpoint = "generate_stream" if stream else "generate"
        connection.request("POST", f"/v2/models/{MODEL}/{endpoint}", json.dumps(body))
        data = connection.getresponse().read()
    finally:
        connection.close()
    lines = [line[6:] for line in data.splitlines() if line.startswith(b"data: ")] if stream else [data]
    answers = [json.loads(line) for line in lines]
    if any("error" in answer for answer in answers):
        return 0, None
    return sum(answer["num_output_tokens"] for answer in answers), "".join(a["text_output"] for a in answers)


if __name__ == "__main__":
    typer.run(main)

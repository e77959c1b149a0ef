"""Case ``lookup``: rounds and time that copies from the text save, beside a bundle's drafts.

    python -m tools.bench.acceptance lookup BUNDLE --kind chat --kind code
    python -m tools.bench.acceptance lookup engines/built/demo-eagle3 --held-out 24

The requests are those of workloads.py, or held-out sentences of the demo's task. One request at a time runs greedily
in each way. A request's texts must be equal. Time is that from the first token to the end.
"""

from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.progress import track

from tandemrt import LLM, SamplingParams
from tools.bench.acceptance.workloads import Workload, workloads
from tools.bench.report import Json, Report, Row
from tools.demo.corpus import held_out

WAYS: dict[str, dict[str, Any]] = {
    "autoregressive": {"num_draft_tokens": 0},
    "drafts": {"lookup": False, "adaptive_draft_tokens": False},
    "drafts and lookup": {"lookup": True, "adaptive_draft_tokens": False},
}


class Figures(NamedTuple):
    """Rounds and seconds of the requests of a kind, and their texts."""

    rounds: int
    seconds: float
    texts: list[list[int]]


def main(
    bundle: Annotated[Path, typer.Argument(help="A bundle with a draft.")],
    kind: Annotated[list[str] | None, typer.Option(help="A kind of request; may be repeated. Default: all.")] = None,
    held_out_sentences: Annotated[
        int, typer.Option("--held-out", min=0, help="Sentences of the demo's task, instead of all kinds.")
    ] = 0,
    way: Annotated[list[str] | None, typer.Option(help=f"{', '.join(WAYS)}; may be repeated. Default: all.")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 1,
    out: Json = None,
) -> None:
    """Print rounds and time of each kind of request, with copies from the text and without them."""
    requests = _held_out(held_out_sentences) if held_out_sentences else workloads()
    requests = {name: of_kind for name, of_kind in requests.items() if not kind or name in kind}
    ways = {name: options for name, options in WAYS.items() if not way or name in way}
    measured = {name: measure(bundle, requests, threads, options) for name, options in ways.items()}
    rows: list[Row] = []
    for name in requests:
        figures = [of_kind[name] for of_kind in measured.values()]
        if any(other.texts != figures[0].texts for other in figures):
            raise RuntimeError(f"{bundle.name}: drafts must not change a text, but they changed one of {name!r}")
        rounds = (way_figures.rounds for way_figures in figures)
        times = (way_figures.seconds / figures[0].seconds for way_figures in figures[1:])
        rows.append((name, sum(map(len, figures[0].texts)), *rounds, *times))
    columns = {"requests": "", "tokens": "d"} | {f"rounds: {name}": "d" for name in ways}
    columns |= {f"time: {name}": ".2f" for name in list(ways)[1:]}
    Report(out).add(f"{bundle.name}: rounds, and time as a ratio to {next(iter(ways))}", columns, rows)


def measure(
    bundle: Path, requests: dict[str, list[Workload]], threads: int, options: dict[str, Any]
) -> dict[str, Figures]:
    """Return the figures of each kind of request."""
    measured = {}
    with LLM(bundle, threads=threads, **options) as llm:
        for kind, of_kind in track(requests.items(), description=str(options)):
            before, texts = llm.metrics.copy(), []
            for workload in of_kind:
                output = llm.chat(workload.messages, workload.params, tools=list(workload.tools))
                texts.append(list(output.token_ids))
            spent = llm.metrics.since(before)
            measured[kind] = Figures(spent.rounds, spent.decode_seconds.sum, texts)
    return measured


def _held_out(count: int) -> dict[str, list[Workload]]:
    params = SamplingParams(temperature=0.0, max_tokens=300)
    return {"held-out sentences": [Workload(example.prompt_messages(), params) for example in held_out(count)]}

"""Case ``lookup``: rounds and time that copies from the text save, beside a bundle's drafts and without them.

    python -m tools.bench.acceptance lookup BUNDLE --kind chat --kind code
    python -m tools.bench.acceptance lookup BUNDLE --ngram BUNDLE_OF_THE_SAME_TARGET --max-tokens 100
    python -m tools.bench.acceptance lookup engines/built/demo-eagle3 --held-out 24

The requests are those of workloads.py, or held-out sentences of the demo's task. One request at a time runs greedily
in each way, after a run that leaves its prompt in the cache. A request's texts must be equal. Time is that of the
processor, so that other work on the machine counts little.
"""

import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.progress import track

from tandemrt import LLM, SamplingParams
from tools.bench.acceptance.workloads import Workload, workloads
from tools.bench.report import Json, Report, Row
from tools.demo.corpus import held_out

PLAIN, COPIES = "autoregressive", "copies only"
WAYS: dict[str, dict[str, Any]] = {
    PLAIN: {"num_draft_tokens": 0},
    "drafts": {"lookup": False, "adaptive_draft_tokens": False},
    "drafts and copies": {"lookup": True, "adaptive_draft_tokens": False},
    "adaptive": {"lookup": False, "adaptive_draft_tokens": True},
    "adaptive and copies": {"lookup": True, "adaptive_draft_tokens": True},
}


class Figures(NamedTuple):
    """Rounds and processor seconds of the requests of a kind, and their texts."""

    rounds: int
    seconds: float
    texts: list[list[int]]


def main(
    bundle: Annotated[Path, typer.Argument(help="A bundle with a draft.")],
    ngram: Annotated[
        Path | None, typer.Option(help=f"A bundle of the same target with n-gram drafts: {COPIES!r}.")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help="A kind of request; may be repeated. Default: all.")] = None,
    held_out_sentences: Annotated[
        int, typer.Option("--held-out", min=0, help="Sentences of the demo's task, instead of all kinds.")
    ] = 0,
    way: Annotated[list[str] | None, typer.Option(help=f"{', '.join(WAYS)}; may be repeated. Default: all.")] = None,
    drafts: Annotated[int | None, typer.Option(min=1, help="Draft tokens of the ways that do not adapt.")] = None,
    texts: Annotated[int | None, typer.Option(min=1, help="Most requests of a kind.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 300,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each engine.")] = 1,
    out: Json = None,
) -> None:
    """Print tokens a round and time of each kind of request, with copies from the text and without them."""
    requests = _held_out(held_out_sentences) if held_out_sentences else workloads()
    requests = {
        name: [each._replace(params=_shortened(each.params, max_tokens)) for each in of_kind[:texts]]
        for name, of_kind in requests.items()
        if not kind or name in kind
    }
    ways = {name: (bundle, options) for name, options in WAYS.items() if not way or name in way}
    ways |= {} if ngram is None else {COPIES: (ngram, {})}
    measured = {}
    for name, (opened, options) in ways.items():
        fixed = {"num_draft_tokens": drafts} if drafts and options.get("adaptive_draft_tokens") is False else {}
        measured[name] = measure(opened, requests, threads, options | fixed)
    rows: list[Row] = []
    for name in requests:
        figures = [of_kind[name] for of_kind in measured.values()]
        if any(other.texts != figures[0].texts for other in figures):
            raise RuntimeError(f"{bundle.name}: drafts must not change a text, but they changed one of {name!r}")
        tokens = sum(map(len, figures[0].texts))
        rows.append(
            (
                name,
                tokens,
                *(of_way.rounds for of_way in figures),
                *(tokens / of_way.seconds for of_way in figures),
                *(figures[0].seconds / of_way.seconds for of_way in figures[1:]),
            )
        )
    columns = {"requests": "", "tokens": "d"} | {f"rounds: {name}": "d" for name in ways}
    columns |= {f"tokens per processor second: {name}": ".1f" for name in ways}
    columns |= {f"speed: {name}": ".2f" for name in list(ways)[1:]}
    Report(out).add(f"{bundle.name}: speed as a ratio to {next(iter(ways))}", columns, rows)


def measure(
    bundle: Path, requests: dict[str, list[Workload]], threads: int, options: dict[str, Any]
) -> dict[str, Figures]:
    """Return the figures of each kind of request."""
    measured = {}
    with LLM(bundle, threads=threads, **options) as llm:
        for kind, of_kind in track(requests.items(), description=str(options)):
            rounds, seconds, texts = 0, 0.0, []
            for workload in of_kind:
                tools = list(workload.tools)
                llm.chat(workload.messages, _shortened(workload.params, 1), tools=tools)
                before, started = llm.metrics.copy(), time.process_time()
                texts.append(list(llm.chat(workload.messages, workload.params, tools=tools).token_ids))
                seconds += time.process_time() - started
                rounds += llm.metrics.since(before).rounds
            measured[kind] = Figures(rounds, seconds, texts)
    return measured


def _shortened(params: SamplingParams, tokens: int) -> SamplingParams:
    return params.model_copy(update={"max_tokens": min(tokens, params.max_tokens or tokens)})


def _held_out(count: int) -> dict[str, list[Workload]]:
    params = SamplingParams(temperature=0.0, max_tokens=300)
    return {"held-out sentences": [Workload(example.prompt_messages(), params) for example in held_out(count)]}

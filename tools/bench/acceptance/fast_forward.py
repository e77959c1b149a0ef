"""Case ``fast-forward``: rounds and time that fast-forward tokens save under a constraint.

python -m tools.bench.acceptance fast-forward BUNDLE [BUNDLE ...]

Each bundle of the demo answers held-out sentences of every kind, and one prompt with an object of 40 required fields in
one fixed layout. One request at a time runs on one thread in three ways: without speculation, with the bundle's drafts,
and with fast-forward tokens as well. The three texts must be equal.
"""

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.progress import track

from tandemrt import LLM, RequestOutput, SamplingParams, StructuredOutputs
from tools.bench.report import Json, Report, Row
from tools.demo.corpus import held_out

FIELDS = {f"measured_value_{number}": {"type": "integer", "minimum": 0, "maximum": 9} for number in range(1, 41)}
FORTY_FIELDS: dict[str, Any] = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}
WAYS = {
    "autoregressive": {"num_draft_tokens": 0},
    "drafts": {"fast_forward_drafts": False},
    "drafts and fast-forward": {"fast_forward_drafts": True},
}
TIMES = ("time with drafts", "time with both")
COLUMNS = {"drafts of": "", "schema": "", "tokens": ".0f"} | dict.fromkeys(WAYS, ".1f") | dict.fromkeys(TIMES, ".2f")


class Figures(NamedTuple):
    """Rounds, milliseconds and tokens of one request, and how many fast-forward drafts were verified in it."""

    rounds: int
    ms: float
    tokens: int
    fast_forward: int


def main(
    bundles: Annotated[list[Path], typer.Argument(help="Bundles of the demo, one per kind of draft.")],
    count: Annotated[int, typer.Option(min=1, help="Held-out sentences.")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs of each sentence; the median counts.")] = 3,
    out: Json = None,
) -> None:
    """Print rounds and time per answer, by draft and schema."""
    rows: list[Row] = []
    for bundle in bundles:
        for schema, requests in _cases(count).items():
            figures = measure(bundle, requests, repeats)
            base, drafts, both = ([_sum(figures[way], name) for name in Figures._fields] for way in WAYS)
            rounds = (each[0] / len(requests) for each in (base, drafts, both))
            times = (each[1] / base[1] for each in (drafts, both))
            rows.append((bundle.name, schema, base[2] / len(requests), *rounds, *times, both[3] / len(requests)))
    title = "Per answer: rounds, and time as a ratio to autoregressive decoding"
    Report(out).add(title, COLUMNS | {"fast-forward drafts": ".1f"}, rows)


def measure(bundle: Path, requests: Sequence[tuple[Any, dict[str, Any]]], repeats: int) -> dict[str, list[Figures]]:
    """Return figures by way, one per request (prompt, schema). Raises RuntimeError where texts differ."""
    with ExitStack() as opened:
        llms = {way: opened.enter_context(LLM(bundle, threads=1, **options)) for way, options in WAYS.items()}  # type: ignore[arg-type]
        figures: dict[str, list[Figures]] = {way: [] for way in WAYS}
        for prompt, schema in track(requests, description=bundle.name):
            whitespace = "compact" if schema is FORTY_FIELDS else "bounded"
            structure = StructuredOutputs(json=schema, whitespace=whitespace)
            params = SamplingParams(temperature=0.0, structured_outputs=structure, max_tokens=300)
            runs = [{way: _run(llm, prompt, params) for way, llm in llms.items()} for _ in range(repeats + 1)][1:]
            if len({json.dumps(output.token_ids) for run in runs for output, _ in run.values()}) > 1:
                raise RuntimeError(f"{bundle.name}: drafts must not change a text, but they changed that of {prompt!r}")
            for way in WAYS:
                ms = statistics.median(run[way][1].ms for run in runs)
                figures[way].append(runs[0][way][1]._replace(ms=ms))
        return figures


def _cases(count: int) -> dict[str, list[tuple[Any, dict[str, Any]]]]:
    cases: dict[str, list[tuple[Any, dict[str, Any]]]] = {}
    for example in held_out(count):
        cases.setdefault(example.kind, []).append((example.prompt_messages(), example.schema))
    return cases | {"40 fields": [("Measured:", FORTY_FIELDS)]}


def _run(llm: LLM, prompt: Any, params: SamplingParams) -> tuple[RequestOutput, Figures]:
    before, start = llm.metrics.copy(), time.perf_counter()
    output = llm.generate(prompt, params)
    ms = 1e3 * (time.perf_counter() - start)
    spent = llm.metrics.since(before)
    return output, Figures(spent.rounds, ms, len(output.token_ids), spent.fast_forward_drafts)


def _sum(figures: Sequence[Figures], name: str) -> float:
    return float(sum(getattr(each, name) for each in figures))

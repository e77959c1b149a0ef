"""Rounds and time that forced tokens save: ``python -m tools.bench_forced BUNDLE [BUNDLE ...]``.

Each bundle of the demo answers held-out sentences of every kind, and one prompt with an object of 40 required fields in
one fixed layout. One request at a time on one thread, three ways in turns: without speculation, with the bundle's
drafts alone, and with forced tokens as well. The texts must be equal.
"""

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tandemrt import LLM, RequestOutput, SamplingParams, StructuredOutputs
from tools.demo.corpus import held_out

FIELDS = {f"measured_value_{number}": {"type": "integer", "minimum": 0, "maximum": 9} for number in range(1, 41)}
WIDE: dict[str, Any] = {
    "type": "object",
    "properties": FIELDS,
    "required": list(FIELDS),
    "additionalProperties": False,
}
WAYS = {"plain": {"window": 0}, "drafts": {"forced_drafts": False}, "drafts and forced": {"forced_drafts": True}}


class Figures(NamedTuple):
    """Of one request: rounds, milliseconds, tokens; of the drafts that a constraint made, how many were verified."""

    rounds: int
    ms: float
    tokens: int
    forced: int


def main(
    bundles: Annotated[list[Path], typer.Argument(help="Bundles of the demo, one per kind of draft.")],
    count: Annotated[int, typer.Option(min=1, help="Held-out sentences")] = 12,
    repeats: Annotated[int, typer.Option(min=1, help="Times that each is answered; the median counts")] = 3,
) -> None:
    """Print rounds and time per answer, by draft and schema."""
    table = Table(title="Per answer: rounds, and time as a ratio to plain decoding", show_edge=False)
    for heading in ("drafts", "schema", "tokens", *WAYS, "time with drafts", "with forced too", "forced drafted"):
        table.add_column(heading, justify="left" if heading in ("drafts", "schema") else "right")
    for bundle in bundles:
        for schema, asked in _cases(count).items():
            figures = measure(bundle, asked, repeats)
            plain, drafts, forced = ([_sum(figures[way], name) for name in Figures._fields] for way in WAYS)
            table.add_row(
                bundle.name,
                schema,
                f"{plain[2] / len(asked):.0f}",
                *(f"{each[0] / len(asked):.1f}" for each in (plain, drafts, forced)),
                *(f"{each[1] / plain[1]:.2f}" for each in (drafts, forced)),
                f"{forced[3] / len(asked):.1f}",
            )
    Console(width=140).print(table)


def measure(bundle: Path, asked: Sequence[tuple[Any, dict[str, Any]]], repeats: int) -> dict[str, list[Figures]]:
    """Figures by way, one per request of ``asked`` (prompt, schema). Raises RuntimeError where texts differ."""
    with ExitStack() as opened:
        llms = {way: opened.enter_context(LLM(bundle, threads=1, **options)) for way, options in WAYS.items()}  # type: ignore[arg-type]
        found: dict[str, list[Figures]] = {way: [] for way in WAYS}
        for prompt, schema in track(asked, description=bundle.name):
            shape = StructuredOutputs(json=schema, disable_any_whitespace=schema is WIDE)
            params = SamplingParams(temperature=0.0, structured_outputs=shape, max_tokens=300)
            runs = [{way: _run(llm, prompt, params) for way, llm in llms.items()} for _ in range(repeats + 1)][1:]
            if len({json.dumps(output.token_ids) for run in runs for output, _ in run.values()}) > 1:
                raise RuntimeError(f"{bundle.name}: the text depends on what was drafted, for {prompt!r}")
            for way in WAYS:
                ms = statistics.median(run[way][1].ms for run in runs)
                found[way].append(runs[0][way][1]._replace(ms=ms))
        return found


def _cases(count: int) -> dict[str, list[tuple[Any, dict[str, Any]]]]:
    cases: dict[str, list[tuple[Any, dict[str, Any]]]] = {}
    for example in held_out(count):
        cases.setdefault(example.kind, []).append((example.prompt_messages(), example.schema))
    return cases | {"40 fields": [("Measured:", WIDE)]}


def _run(llm: LLM, prompt: Any, params: SamplingParams) -> tuple[RequestOutput, Figures]:
    before, start = llm.metrics.copy(), time.perf_counter()
    output = llm.generate(prompt, params)
    ms = 1e3 * (time.perf_counter() - start)
    spent = llm.metrics.since(before)
    return output, Figures(spent.rounds, ms, len(output.token_ids), spent.forced_drafts)


def _sum(figures: Sequence[Figures], name: str) -> float:
    return float(sum(getattr(each, name) for each in figures))


if __name__ == "__main__":
    typer.run(main)

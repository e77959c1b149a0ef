"""Figures of all engines, and their tables."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.bench.cpu.measures import Measure
from tools.bench.cpu.models import Entrant

OURS = "tandemrt"
MISSING = "–"
START = {"start": "process start to the first token, s", "peak": "peak memory at the first token, MB"}


@dataclass
class Results:
    """Figures of a comparison.

    Attributes:
        figures: one figure per repeat, by entrant and measure.
        outputs: of the last run.
        left_out: the reason, by entrant.
        missing: the reason, by entrant and measure.
    """

    figures: dict[Entrant, dict[str, list[float]]] = field(default_factory=dict)
    outputs: dict[Entrant, dict[str, list[list[int]]]] = field(default_factory=dict)
    left_out: dict[Entrant, str] = field(default_factory=dict)
    missing: dict[tuple[Entrant, str], str] = field(default_factory=dict)

    def add(self, entrant: Entrant, name: str, figure: float) -> None:
        self.figures.setdefault(entrant, {}).setdefault(name, []).append(figure)

    def median(self, entrant: Entrant, name: str) -> float | None:
        values = self.figures.get(entrant, {}).get(name)
        return statistics.median(values) if values else None

    def best(self, name: str, *, quantized: bool, ours: bool, more_is_better: bool) -> tuple[float, Entrant] | None:
        """Return the best median of our entrants or of the others, and its entrant."""
        entrants = [each for each in self.figures if each.quantized == quantized and (each.engine == OURS) == ours]
        medians = [(median, each) for each in entrants if (median := self.median(each, name)) is not None]
        if not medians:
            return None
        return (max if more_is_better else min)(medians, key=lambda pair: pair[0])

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Results":
        """Return the figures that ``to_json`` wrote; outputs and reasons are left out."""
        return cls({Entrant(*entrant.split(" ", 1)): figures for entrant, figures in data["figures"].items()})

    def to_json(self) -> dict[str, Any]:
        return {
            "figures": {str(entrant): figures for entrant, figures in self.figures.items()},
            "left_out": {str(entrant): why for entrant, why in self.left_out.items()},
            "missing": {f"{entrant}, {name}": why for (entrant, name), why in self.missing.items()},
        }


def table(
    results: Results, measures: Mapping[str, Measure], *, quantized: bool, mark: Callable[[str], str]
) -> list[list[str]]:
    """Return a head and a row per measure: a column per entrant, and the ratio of our best to the best other engine.

    ``mark`` is applied to the best figure of a row. Empty without entrants.
    """
    entrants = [each for each in results.figures if each.quantized == quantized]
    if not entrants:
        return []
    titles = {name: measure.title for name, measure in measures.items()} | START
    rows = [["", *map(str, entrants), "ratio"]]
    for name, title in titles.items():
        more = name in measures and measures[name].more_is_better
        ours, theirs = (
            results.best(name, quantized=quantized, ours=each, more_is_better=more) for each in (True, False)
        )
        ratio = f"{ours[0] / theirs[0]:.2f}" if ours and theirs else MISSING
        cells = [results.median(each, name) for each in entrants]
        best = (max if more else min)((cell for cell in cells if cell is not None), default=None)
        shown = [mark(_cell(cell)) if cell is not None and cell == best else _cell(cell) for cell in cells]
        rows.append([title, *shown, ratio])
    return rows


def markdown(results: Results, measures: Mapping[str, Measure], *, quantized: bool) -> str:
    """Return ``table`` in Markdown."""
    rows = table(results, measures, quantized=quantized, mark=lambda cell: f"**{cell}**")
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines[:1], f"|{' --- |' * len(rows[0])}", *lines[1:]]) if rows else ""


def agreement(results: Results, name: str) -> str:
    """Return how many float32 engines generated the text of the first one."""
    texts = {each: output[name] for each, output in results.outputs.items() if name in output and not each.quantized}
    first = next(iter(texts.values()), None)
    same = [each for each, text in texts.items() if text == first]
    return f"{len(same)} of {len(texts)}"


def _cell(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"

"""Figures of all engines, and the tables they are shown in."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tools.bench_cpu.measures import Measure
from tools.bench_cpu.models import Entrant

OURS = "tandemrt"
START = {"start": "process start to the first token, s", "peak": "peak memory at the first token, MB"}


@dataclass
class Results:
    """``figures`` of every entrant and measure, one a repeat; ``outputs`` of its last run; ``left_out``: why."""

    figures: dict[Entrant, dict[str, list[float]]] = field(default_factory=dict)
    outputs: dict[Entrant, dict[str, list[list[int]]]] = field(default_factory=dict)
    left_out: dict[Entrant, str] = field(default_factory=dict)
    missing: dict[tuple[Entrant, str], str] = field(default_factory=dict)

    def add(self, entrant: Entrant, name: str, figure: float) -> None:
        self.figures.setdefault(entrant, {}).setdefault(name, []).append(figure)

    def median(self, entrant: Entrant, name: str) -> float | None:
        found = self.figures.get(entrant, {}).get(name)
        return statistics.median(found) if found else None

    def best(self, name: str, *, narrow: bool, ours: bool, more_is_better: bool) -> tuple[float, Entrant] | None:
        """The best median of ours or of the peers, and whose it is."""
        entrants = [each for each in self.figures if each.narrow == narrow and (each.engine == OURS) == ours]
        found = [(median, each) for each in entrants if (median := self.median(each, name)) is not None]
        if not found:
            return None
        return (max if more_is_better else min)(found, key=lambda pair: pair[0])

    def to_json(self) -> dict[str, Any]:
        return {
            "figures": {str(entrant): figures for entrant, figures in self.figures.items()},
            "left_out": {str(entrant): why for entrant, why in self.left_out.items()},
            "missing": {f"{entrant}, {name}": why for (entrant, name), why in self.missing.items()},
        }


def markdown(results: Results, measures: Mapping[str, Measure], *, narrow: bool) -> str:
    """One table: a row per measure, a column per entrant, and our best as a ratio to the best peer's."""
    entrants = [each for each in results.figures if each.narrow == narrow]
    if not entrants:
        return ""
    titles = {name: measure.title for name, measure in measures.items()} | START
    rows = ["| | " + " | ".join(map(str, entrants)) + " | ratio |", "| --- |" + " --- |" * (len(entrants) + 1)]
    for name, title in titles.items():
        more = name in measures and measures[name].more_is_better
        ours, theirs = (results.best(name, narrow=narrow, ours=each, more_is_better=more) for each in (True, False))
        ratio = f"{ours[0] / theirs[0]:.2f}" if ours and theirs else "–"
        best = max if more else min
        cells = [results.median(each, name) for each in entrants]
        known = [cell for cell in cells if cell is not None]
        shown = [_cell(cell, bold=cell is not None and cell == best(known)) for cell in cells]
        rows.append(f"| {title} | {' | '.join(shown)} | {ratio} |")
    return "\n".join(rows)


def agreement(results: Results, name: str) -> str:
    """How many float32 engines wrote what the first of them wrote."""
    texts = {each: made[name] for each, made in results.outputs.items() if name in made and not each.narrow}
    first = next(iter(texts.values()), None)
    same = [each for each, text in texts.items() if text == first]
    return f"{len(same)} of {len(texts)}"


def _cell(value: float | None, *, bold: bool) -> str:
    if value is None:
        return "–"
    text = f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
    return f"**{text}**" if bold else text

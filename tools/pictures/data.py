"""Read the measured tables of docs/data: one CSV file per table."""

import csv
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "data"


def rows(name: str) -> list[dict[str, str]]:
    """Return the rows of ``docs/data/NAME.csv`` by column. Three comments come first: title, command, machine."""
    lines = (FOLDER / f"{name}.csv").read_text().splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def column(table: Sequence[dict[str, str]], name: str) -> list[float | None]:
    """Return the numbers of a column; None where a cell is empty."""
    return [float(row[name]) if row[name] else None for row in table]


def series(table: Sequence[dict[str, str]], measure: str, batches: Sequence[str]) -> dict[str, list[float | None]]:
    """Return the numbers of one measure by engine, for these batch sizes."""
    picked = {row["engine"]: row for row in table if row["measure"] == measure}
    return {engine: [float(row[batch]) if row[batch] else None for batch in batches] for engine, row in picked.items()}

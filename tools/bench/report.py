"""Tables of measurements, printed as they are finished and written as JSON."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Json = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file as well.")]
Row = tuple[str | int | float | None, ...]


class Report:
    """Print each table when it is complete, and rewrite ``out`` with all tables so far."""

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._tables: list[dict[str, Any]] = []

    def add(self, title: str, columns: Mapping[str, str], rows: list[Row]) -> None:
        """Add a table. ``columns`` maps headings to format specifications; None is printed as "-"."""
        table = Table(title=title)
        for name in columns:
            table.add_column(name, overflow="fold")  # URLs of servers differ at their ends
        for row in rows:
            cells = zip(row, columns.values(), strict=True)
            table.add_row(*("-" if value is None else format(value, spec) for value, spec in cells))
        Console(width=140).print(table)
        self._tables.append({"title": title, "rows": [dict(zip(columns, row, strict=True)) for row in rows]})
        if self._out is not None:
            self._out.write_text(json.dumps(self._tables, indent=1) + "\n")

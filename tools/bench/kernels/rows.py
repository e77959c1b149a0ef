"""Options of several cases: for how many rows and tokens they measure."""

from typing import Annotated

import typer

Rows = Annotated[str, typer.Option(help="Rows (tokens) of each line, with commas.")]
Batch = Annotated[list[int] | None, typer.Option(help="Rows; may be repeated.")]
New = Annotated[list[int] | None, typer.Option(help="New tokens per row; may be repeated.")]
Cached = Annotated[int, typer.Option(help="Cached tokens per row.")]


def counts(rows: str) -> list[int]:
    """Parse "1,5,16"."""
    return [int(each) for each in rows.split(",")]

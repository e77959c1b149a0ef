"""The option ``--rows``: for how many rows a case measures."""

from typing import Annotated

import typer

Rows = Annotated[str, typer.Option(help="Rows (tokens) of each line, with commas.")]


def counts(rows: str) -> list[int]:
    """Parse "1,5,16"."""
    return [int(each) for each in rows.split(",")]

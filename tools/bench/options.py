"""Options that several benchmarks have."""

from typing import Annotated

import typer

Rows = Annotated[str, typer.Option(help="Rows (tokens) of each line, with commas.")]
Batch = Annotated[list[int] | None, typer.Option(help="Rows; may be repeated.")]
New = Annotated[list[int] | None, typer.Option(help="New tokens per row; may be repeated.")]
Runs = Annotated[bool, typer.Option(help="New tokens are prompt chunks instead of draft windows.")]
Splits = Annotated[
    int | None, typer.Option(help="Thread blocks that share a row's keys. Default: the kernel's choice.")
]
Cached = Annotated[int, typer.Option(help="Cached tokens per row.")]


def integers(text: str) -> list[int]:
    """Parse "1,16,64"; an empty text is an empty list."""
    return [int(part) for part in text.split(",") if part]

"""Command line of a benchmark with several cases."""

from collections.abc import Callable, Mapping

import typer


def run_cases(cases: Mapping[str, Callable[..., None]]) -> None:
    """Run the case that the command line names; each of ``cases`` is a typer command with its own options."""
    commands = typer.Typer(add_completion=False, no_args_is_help=True)
    for name, main in cases.items():
        commands.command(name)(main)
    commands()

"""The command line: one application, commands from the folders that own them."""

import sys

import typer
from rich.console import Console
from rich.text import Text

from tandemrt.engines.errors import TandemError
from tandemrt.export import commands as export
from tandemrt.runtime.check import command as check
from tandemrt.runtime.cli import commands as runtime

app = typer.Typer(
    help="Compile a draft and a target language model into engines and run them in tandem.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
export.register(app)
check.register(export.export)  # it stands with the other commands on bundles, but it needs the runtime
runtime.register(app)


def main() -> None:
    """Run the command line. What TandemRT refuses is printed as one message; the exit code is 2."""
    try:
        app()
    except TandemError as error:
        console = Console(stderr=True)
        console.print(Text(f"{type(error).__name__}: {error}", style="red"), soft_wrap=True)
        sys.exit(2)

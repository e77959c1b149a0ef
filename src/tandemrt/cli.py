"""The `tandemrt` command line. The export and runtime packages add their commands to one application."""

import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from tandemrt import __version__
from tandemrt.engines.options.vllm_names import own_name
from tandemrt.engines.validation.errors import TandemError, named
from tandemrt.engines.validation.extras import pip_install
from tandemrt.engines.validation.system_errors import system_advice
from tandemrt.runtime.cli.register import MODULES, register

EXTRAS = {"torch": "build", "onnxruntime": "cpu"}  # packages that some commands need, and the extra that brings them


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"tandemrt {__version__}")
        raise typer.Exit


def _options(
    _version: Annotated[
        bool, typer.Option("--version", help="Print the version.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    pass


class _Commands(TyperGroup):
    """Names the group of a command that is typed without it, such as ``build``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        accepted = ctx.resilient_parsing or args[0] in self.commands  # a shell that completes words wants no error
        for name, group in self.commands.items():
            if not accepted and args[0] in getattr(group, "commands", ()):
                ctx.fail(f"No such command {args[0]!r}. Did you mean '{name} {args[0]}'?")
        return super().resolve_command(ctx, args)


def application(only: str | None = None) -> typer.Typer:
    """Return the command line with all commands, or ``only`` one: reading all takes longer than some commands."""
    app = typer.Typer(
        cls=_Commands,
        help="Compile a draft and a target language model into engines and run them in tandem.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich's tables leave 20 of 80 columns for the text
        context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": own_name},
        callback=_options,
    )
    if only is None:
        from tandemrt.export.cli.commands import export

        app.add_typer(export, name="export")
    register(app, only)
    return app


def main() -> None:
    """Run the command line. Prints a TandemError, what to install, or what the system lacks; exits with code 2 then."""
    _open_closed_streams()
    try:
        application(sys.argv[1] if sys.argv[1:] and sys.argv[1] in MODULES else None)()
    except TandemError as error:
        _fail(f"{type(error).__name__}: {error}")
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS:
            raise
        _fail(f"BackendUnavailable: this needs {error.name}: {pip_install(EXTRAS[error.name])}")
    except Exception as error:
        if (advice := system_advice(error)) is None:
            raise
        _fail(f"{named(error)}; {advice}")


def _open_closed_streams() -> None:
    """Open the null device in place of closed standard streams, whose numbers other files would get."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number
            setattr(sys, name, os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False))


def _fail(message: str) -> NoReturn:
    Console(stderr=True).print(Text(message, style="red"), soft_wrap=True)
    sys.exit(2)

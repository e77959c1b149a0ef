"""Add the runtime's commands to the command line. A command's module is imported for it alone."""

from importlib import import_module

import typer

from tandemrt.engines.options.command_options import CommandWithSections

# In the order of the help: the modules, whose attributes have the commands' names.
MODULES = {
    "run": "run",
    "chat": "chat",
    "serve": "serve",
    "batch": "batch",
    "bench": "commands",
    "calibrate": "calibrate",
    "check": "check",
    "models": "models",
    "doctor": "commands",
}


def register(app: typer.Typer, only: str | None) -> None:
    """Add the commands to ``app``, or ``only`` one of them."""
    for name, module in MODULES.items():
        if only in (None, name):
            command = getattr(import_module(f"tandemrt.runtime.cli.{module}"), name)
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(cls=CommandWithSections)(command)

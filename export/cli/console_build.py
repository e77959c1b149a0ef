"""Find or build a model's bundle, with the recipe, the steps and the notes on standard error."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.export.bundle.find_or_build import find_or_build
from tandemrt.export.cli.progress import Progress


def bundle_of(model: str, options: BuildOptions, *, needs_chat_template: bool = False) -> Path:
    """Return the folder of a model's bundle; see find_or_build, which builds it if no earlier run did."""
    console = Console(stderr=True, soft_wrap=True)
    with Progress(console) as progress:
        return find_or_build(
            model,
            options,
            begin=progress.begin,
            on_recipe=lambda file: print_recipe(console, file),
            on_note=lambda note: console.print(escape(note), highlight=False),
            progress=progress.detail,
            needs_chat_template=needs_chat_template,
        )


def print_recipe(console: Console, file: Path) -> None:
    """Print a default recipe and where it is, so that the user can save and edit it."""
    console.print(f"[dim]recipe (to change it, edit a copy of {file}):[/]", highlight=False)
    from rich.syntax import Syntax  # imports a library of languages

    console.print(Syntax(file.read_text(encoding="utf-8"), "toml", background_color="default"))

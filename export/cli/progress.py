"""The steps of a build on the console."""

import time
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

from tandemrt.engines.options.build_listener import BuildListener

console = Console(soft_wrap=True)
DONE, FAILED, INTERRUPTED = "[green]done[/green]  ", "[red]failed[/red]", "[yellow]interrupted[/yellow]"


class ConsoleListener(BuildListener):
    """Shows the running step with a spinner, and leaves a line with its time when the next step begins."""

    def __init__(self, console: Console = console) -> None:
        self._console = console
        self._status = Status("", console=console)
        self._title: str | None = None
        self._start = 0.0

    def begin(self, title: str) -> None:
        self._finish()
        self._title, self._start = title, time.perf_counter()
        self._status.update(escape(title))

    def detail(self, unit: str, done: int, total: int) -> None:
        """Show after the step's title how far it is, how fast, and how long the rest takes at that pace."""
        pace = done / max(1e-9, time.perf_counter() - self._start)
        left = f", {(total - done) / pace:.0f} s left" if pace else ""
        self._status.update(escape(f"{self._title}: {unit}, {done} of {total}, {pace:.3g}/s{left}"))

    def recipe(self, file: Path) -> None:
        """Print a default recipe and where it is, so that the user can save and edit it."""
        self._finish()
        self._console.print(f"[dim]recipe (to change it, edit a copy of {file}):[/]", highlight=False)
        from rich.syntax import Syntax  # imports a library of languages

        self._console.print(Syntax(file.read_text(encoding="utf-8"), "toml", background_color="default"))

    def __enter__(self) -> "ConsoleListener":
        self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        interrupted = kind is not None and issubclass(kind, KeyboardInterrupt | SystemExit)
        self._finish(DONE if kind is None else INTERRUPTED if interrupted else FAILED)
        self._status.stop()

    def _finish(self, outcome: str = DONE) -> None:
        if self._title is not None:
            self._console.print(f"{outcome} {time.perf_counter() - self._start:6.1f} s  {escape(self._title)}")
            self._title = None

"""The steps of a build, as a person watches them."""

import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

console = Console(soft_wrap=True)


class Progress:
    """Shows the running step with a spinner and leaves a line with its time when the next one begins."""

    def __init__(self) -> None:
        self._status = Status("", console=console)
        self._title: str | None = None
        self._start = 0.0

    def begin(self, title: str) -> None:
        self._finish()
        self._title, self._start = title, time.perf_counter()
        self._status.update(escape(title))

    def detail(self, phase: str, done: int, total: int) -> None:
        """Show how far a phase of the running step is, and how fast. The step's own title stays in front."""
        pace = done / max(1e-9, time.perf_counter() - self._start)
        self._status.update(escape(f"{self._title}: {phase}, {done} of {total}, {pace:.3g}/s"))

    def __enter__(self) -> "Progress":
        self._status.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._finish("[green]done[/green]  " if kind is None else "[red]failed[/red]")
        self._status.stop()

    def _finish(self, outcome: str = "[green]done[/green]  ") -> None:
        if self._title is not None:
            console.print(f"{outcome} {time.perf_counter() - self._start:6.1f} s  {escape(self._title)}")

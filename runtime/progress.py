"""How far long work is, for a person at a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that takes steps done and steps in all; it draws a bar on a terminal's stderr, else nothing."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

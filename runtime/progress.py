"""How far long work is, for a person at a terminal; nobody else pays for rich's import."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LARGE = 1 << 30  # bytes of weights from which on opening takes long enough to say so


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Give a function that takes steps done and steps in all; it draws a bar on a terminal's stderr, else nothing."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def working(title: str, size: int) -> Iterator[None]:
    """Show that work on ``size`` bytes goes on, and for how long, on a terminal's stderr, if they are many."""
    if size < LARGE or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        shown.add_task(f"{title}, {size / 1e9:.1f} GB", total=None)
        yield

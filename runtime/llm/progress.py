"""Progress display on a terminal; rich is imported only when it is needed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

LARGE = 1 << 30  # bytes of weights above which opening takes long enough to show


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yield a function of (steps done, total steps) that draws a bar if stderr is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    bar = Progress(console=console, transient=True, disable=not console.is_terminal)
    with _shown(bar):
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def spinner(title: str, size: int) -> Iterator[None]:
    """Show a spinner with the elapsed time if ``size`` bytes are at least LARGE and stderr is a terminal."""
    if size < LARGE or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    shown = Progress(*columns, console=Console(stderr=True), transient=True)
    with _shown(shown):
        shown.add_task(f"{title}, {size / 1e9:.1f} GB", total=None)
        yield


@contextmanager
def _shown(progress: "Progress") -> Iterator[None]:
    """Show ``progress`` while the block runs, unless the operating system refuses the thread that redraws it."""
    try:
        progress.start()
    except RuntimeError:
        progress.stop()
    try:
        yield
    finally:
        progress.stop()

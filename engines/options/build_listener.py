"""What a build reports while it runs."""

from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str, int, int], None]  # within a step: unit, number done, total number


class BuildListener:
    """Receives what a build reports. This one ignores it; the command line prints it (export/cli/progress.py)."""

    def begin(self, title: str) -> None:
        """Receive the title of a step when it begins."""

    def detail(self, unit: str, done: int, total: int) -> None:
        """Receive the progress within a step."""

    def recipe(self, file: Path) -> None:
        """Receive the file of a default recipe before it is built."""


SILENT = BuildListener()

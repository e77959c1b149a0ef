"""Mutants: small bugs, each a replacement at one place of a file."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 1200.0  # a bug may make a test run forever


@dataclass(frozen=True)
class Mutant:
    """A small bug.

    Attributes:
        name: unique in its sample; it ends with the operator that made the bug.
        file: what it changes, relative to the root of the tree.
        text: the replaced text.
        becomes: the replacement.
        tests: arguments of pytest, relative to the root: the tests that should find the bug.
        start: where ``text`` starts in the file, in characters.
        limit_s: how long all tests may take; a mutant with which they take longer is found.
    """

    name: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]
    start: int
    limit_s: float = LIMIT_S

    @contextmanager
    def applied(self, tree: Path) -> Iterator[None]:
        """Plant the bug in ``tree`` while the block runs."""
        path = tree / self.file
        content, end = path.read_text(), self.start + len(self.text)
        if content[self.start : end] != self.text:
            raise ValueError(f"{self.name}: the tree must not change after bugs were drawn; draw them again")
        path.write_text(content[: self.start] + self.becomes + content[end:])
        try:
            yield
        finally:
            path.write_text(content)

"""Mutants: small bugs, each a replacement in one file. ``tools/mutants/*.toml`` lists those that people chose."""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
LIST = ROOT / "tools" / "mutants"
LIMIT_S = 1200.0  # a bug may make a test run forever


@dataclass(frozen=True)
class Mutant:
    """A small bug.

    Attributes:
        name: unique in its list or sample.
        file: what it changes, relative to the root of the tree.
        text: the replaced text.
        becomes: the replacement.
        tests: arguments of pytest, relative to the root: the tests that should find the bug.
        means: the effect of the bug, in one line; of a sampled mutant its operator.
        harmless: why no test can or need find it; empty for a bug that matters.
        served: the tests need the environment with a Triton server.
        start: where ``text`` starts in the file, in characters; None: ``text`` occurs exactly once.
        limit_s: how long all tests may take; a mutant with which they take longer is found.
    """

    name: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]
    means: str
    harmless: str = ""
    served: bool = False
    start: int | None = None
    limit_s: float = LIMIT_S

    def changed(self, content: str) -> str | None:
        """Return the file with the bug, or None if it does not apply to ``content``."""
        if self.text == self.becomes or (self.start is None and content.count(self.text) != 1):
            return None
        start = content.index(self.text) if self.start is None else self.start
        end = start + len(self.text)
        return content[:start] + self.becomes + content[end:] if content[start:end] == self.text else None

    def applies(self, tree: Path) -> bool:
        path = tree / self.file
        return path.is_file() and self.changed(path.read_text()) is not None

    @contextmanager
    def applied(self, tree: Path) -> Iterator[None]:
        """Plant the bug in ``tree`` while the block runs."""
        path = tree / self.file
        content = path.read_text()
        changed = self.changed(content)
        assert changed is not None
        path.write_text(changed)
        try:
            yield
        finally:
            path.write_text(content)


def read_mutants(folder: Path = LIST) -> list[Mutant]:
    """Return the list, in the order of its files. Raises TypeError for an entry with unknown fields."""
    entries = [entry for file in sorted(folder.glob("*.toml")) for entry in tomllib.loads(file.read_text())["mutant"]]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]

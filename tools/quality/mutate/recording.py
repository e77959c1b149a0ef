"""Which tests run which lines: recorded by ``python -m tools.quality.mutate record``, read from ``.mutate_cache``."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from coverage import CoverageData

from tools.quality.mutate.lab import copied_tree
from tools.quality.mutate.mutants import ROOT
from tools.quality.mutate.operators import Edit
from tools.quality.mutate.recorder import FOLDER, TOPS, shared_fixture

CACHE = ROOT / ".mutate_cache"
TESTS = ("tests/plain", "tests/engine", "tests/openai")


class NoRecording(Exception):
    """There is no recording of this tree."""


@dataclass(frozen=True)
class RecordedTest:
    """``contexts``: the test's own and those of its shared fixtures. ``seconds``: without fixtures."""

    id: str
    seconds: float
    contexts: frozenset[str]


class Recording:
    """The lines that tests run.

    A file that has changed since the recording counts as one line: each of its tests runs all of it.
    """

    def __init__(self, folder: Path, tree: Path) -> None:
        """Raises NoRecording."""
        if not (folder / "lines").is_file():
            raise NoRecording(f"{folder} holds no recording; run python -m tools.quality.mutate record")
        recorded = json.loads((folder / "tests.json").read_text())
        self._tree = tree
        self._digests: dict[str, str] = recorded["files"]
        self._fixtures: dict[str, float] = recorded["fixtures"]
        self._lines = CoverageData(str(folder / "lines"))
        self._lines.read()
        self._tests = [self._test(name, test) for name, test in sorted(recorded["tests"].items()) if test["passed"]]
        self._contexts = cache(self._read_contexts)

    def tests_of(self, file: str, edit: Edit) -> list[RecordedTest]:
        """The tests that passed and run the code of ``edit``, in no particular order."""
        contexts = self._running(file, range(edit.runs[0], edit.runs[1] + 1))
        if edit.imported:
            contexts |= self._naming(edit.names) if edit.names else self._running(file, None)
        return [test for test in self._tests if test.contexts & contexts]

    def chosen(self, tests: Iterable[RecordedTest], seconds: float) -> tuple[list[str], float]:
        """Choose tests that take at most ``seconds`` with their fixtures; return their ids and that duration.

        Many different ones find more than many cases of one: first one case of each function, the quickest first.
        """
        order: list[tuple[int, float, RecordedTest]] = []
        cases: dict[str, int] = {}
        for test in sorted(tests, key=lambda test: test.seconds):
            function = test.id.partition("[")[0]
            cases[function] = cases.get(function, -1) + 1
            order.append((cases[function], test.seconds, test))
        ids: list[str] = []
        ready: set[str] = set()
        total = 0.0
        for _, own, test in sorted(order, key=lambda each: each[:2]):
            cost = own + sum(self._fixtures.get(context, 0.0) for context in test.contexts - ready)
            if total + cost <= seconds or not ids:
                ids.append(test.id)
                ready |= test.contexts
                total += cost
        return ids, total

    def _test(self, name: str, recorded: dict[str, object]) -> RecordedTest:
        fixtures = recorded["fixtures"]
        seconds = recorded["seconds"]
        assert isinstance(fixtures, list)
        assert isinstance(seconds, float)
        module = name.partition("::")[0]
        bases = ["", *(str(parent) for parent in Path(module).parents), module]
        shared = {shared_fixture(fixture, base) for fixture in fixtures for base in bases}
        return RecordedTest(name, seconds, frozenset({name} | (shared & self._fixtures.keys())))

    def _running(self, file: str, lines: Iterable[int] | None) -> set[str]:
        contexts = self._contexts(file)
        same = _digest(self._tree / file) == self._digests.get(file)
        tests_of_lines = contexts.values() if lines is None or not same else (contexts.get(line, ()) for line in lines)
        return {context for line in tests_of_lines for context in line}

    def _naming(self, names: Sequence[str]) -> set[str]:
        word = re.compile(rf"\b(?:{'|'.join(map(re.escape, names))})\b")
        contexts: set[str] = set()
        for file in self._digests:
            if (path := self._tree / file).is_file():
                lines = [number for number, line in enumerate(path.read_text().splitlines(), 1) if word.search(line)]
                contexts |= self._running(file, lines) if lines else set()
        return contexts

    def _read_contexts(self, file: str) -> dict[int, list[str]]:
        return self._lines.contexts_by_lineno(file)


def record(tests: Sequence[str], jobs: int, folder: Path = CACHE) -> int:
    """Run ``tests`` in a copy of the tree and write the recording; return pytest's exit status.

    Tests that fail are left out of the recording.
    """
    with copied_tree() as tree:
        parts = tree.parent / "parts"
        parts.mkdir()
        packages = os.pathsep.join(filter(None, [str(tree / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1", FOLDER: str(parts)}
        options = ["-q", "-n", str(jobs), "-p", "no:randomly", "-p", "tools.quality.mutate.recorder"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *tests], cwd=tree, env=environment, check=False
        )
        merge(parts, tree, folder)
        return done.returncode


def merge(parts: Path, tree: Path, folder: Path) -> None:
    """Write the recording of all processes that left data in ``parts`` to ``folder``."""
    recorded = [json.loads(part.read_text()) for part in parts.glob("tests-*.json")]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    lines = CoverageData(str(folder / "lines"))
    for part in sorted(parts.glob("lines.*")):
        data = CoverageData(str(part))
        data.read()
        lines.update(data, map_path=lambda path: os.path.relpath(path, tree))
    files = [path for top in TOPS for path in (tree / top).rglob("*.py")]
    content = {
        "tests": {name: test for part in recorded for name, test in part["tests"].items()},
        "fixtures": {name: seconds for part in recorded for name, seconds in part["fixtures"].items()},
        "files": {str(path.relative_to(tree)): _digest(path) for path in sorted(files)},
    }
    (folder / "tests.json").write_text(json.dumps(content))


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

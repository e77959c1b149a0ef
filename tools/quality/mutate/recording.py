"""Which tests run which lines: recorded by ``python -m tools.quality.mutate record``, read from ``.mutate_cache``."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from coverage import CoverageData

from tools.quality.mutate.lab import copied_tree
from tools.quality.mutate.mutants import ROOT
from tools.quality.mutate.operators import Edit
from tools.quality.mutate.recorder import FOLDER, IMPORT, TOPS, shared_fixture

CACHE = ROOT / ".mutate_cache"
TESTS = ("tests/plain", "tests/engine", "tests/openai")
FILES_OF_A_PIECE = 16
_EACH_S = 0.01  # of pytest for each test


class NoRecording(Exception):
    """There is no recording of this tree."""


@dataclass(frozen=True)
class RecordedTest:
    """``contexts``: the test's own and those of its shared fixtures. ``seconds``: without fixtures.

    ``distance`` from the bug: 0 for a test whose id has the name that it changes, 1 for one of a file that imports its
    module, 2 for others.
    """

    id: str
    seconds: float
    contexts: frozenset[str]
    distance: int = 2


class Recording:
    """The lines that tests run, of all pieces in a folder; the newest piece with a test file counts for its tests."""

    def __init__(self, folder: Path, tree: Path) -> None:
        """Raises NoRecording."""
        self._pieces = [Piece(piece, tree) for piece in _pieces(folder)]
        if not self._pieces:
            raise NoRecording(f"{folder} holds no recording; run python -m tools.quality.mutate record")
        self._tree = tree
        self._newest = {file: piece for piece in self._pieces for file in piece.test_files}
        self._fixtures = {name: seconds for piece in self._pieces for name, seconds in piece.fixtures.items()}

    def tests_of(self, file: str, edit: Edit) -> list[RecordedTest]:
        """The tests that passed and run the code of ``edit``, in no particular order."""
        return [
            test
            for piece in self._pieces
            for test in piece.tests_of(file, edit)
            if self._newest[_module(test.id)] is piece
        ]

    def has(self, test_file: str) -> bool:
        """Return whether the tests of a file were recorded as the file is now."""
        piece = self._newest.get(test_file)
        return piece is not None and piece.test_files[test_file] == _digest(self._tree / test_file)

    def chosen(self, tests: Iterable[RecordedTest], seconds: float) -> tuple[list[str], float]:
        """Choose tests that take at most ``seconds`` with their fixtures; return their ids and that duration.

        The nearest come first: most tests of a module that all requests run are about others. Each function has as much
        time as any other, so a table of quick cases comes before the second case of a slow one; what uses a fixture has
        its part of that time. The tests of a file follow one another, so that its fixtures are made once.
        """
        order: list[tuple[int, float, RecordedTest]] = []
        used: dict[str, float] = {}
        tests = sorted(tests, key=lambda test: test.seconds)
        users = Counter(context for test in tests for context in test.contexts)
        for test in tests:
            function = test.id.partition("[")[0]
            shared = sum(self._fixtures.get(context, 0.0) / users[context] for context in test.contexts)
            used[function] = used.get(function, 0.0) + test.seconds + _EACH_S + shared
            order.append((test.distance, used[function], test))
        ids: list[str] = []
        ready: set[str] = set()
        total = 0.0
        for *_, test in sorted(order, key=lambda each: each[:2]):
            fixtures = sum(self._fixtures.get(context, 0.0) for context in test.contexts - ready)
            cost = test.seconds + _EACH_S + fixtures
            if total + cost <= seconds or not ids:
                ids.append(test.id)
                ready |= test.contexts
                total += cost
        first = {module: at for at, module in reversed([*enumerate(map(_module, ids))])}
        return sorted(ids, key=lambda test: first[_module(test)]), total


class Piece:
    """What one run of pytest has recorded. ``test_files``: their digests; ``fixtures``: seconds of the shared ones.

    A file that has changed since the recording counts as one line: each of its tests runs all of it.
    """

    def __init__(self, folder: Path, tree: Path) -> None:
        recorded = json.loads((folder / "tests.json").read_text())
        self.test_files: dict[str, str] = recorded["test files"]
        self.fixtures: dict[str, float] = recorded["fixtures"]
        self._tree = tree
        self._digests: dict[str, str] = recorded["files"]
        self._lines = CoverageData(str(folder / "lines"))
        self._lines.read()
        self._tests = [self._test(name, test) for name, test in sorted(recorded["tests"].items()) if test["passed"]]
        self._contexts = cache(self._read_contexts)

    def tests_of(self, file: str, edit: Edit) -> list[RecordedTest]:
        contexts = self._running(file, range(edit.runs[0], edit.runs[1] + 1))
        importing = self._importing(file)
        seen = importing if edit.imported or IMPORT in contexts else set()
        if edit.imported:
            contexts |= self._naming(edit.names) if edit.names else self._running(file, None)
        named = re.compile(rf"(?<![a-z])(?:{'|'.join(map(re.escape, edit.names))})(?![a-z])") if edit.names else None
        return [
            replace(test, distance=0 if named and named.search(test.id) else 2 - (_module(test.id) in importing))
            for test in self._tests
            if test.contexts & contexts or _module(test.id) in seen
        ]

    def _test(self, name: str, recorded: dict[str, object]) -> RecordedTest:
        fixtures = recorded["fixtures"]
        seconds = recorded["seconds"]
        assert isinstance(fixtures, list)
        assert isinstance(seconds, float)
        module = _module(name)
        bases = ["", *(str(parent) for parent in Path(module).parents), module]
        shared = {shared_fixture(fixture, base) for fixture in fixtures for base in bases}
        return RecordedTest(name, seconds, frozenset({name} | (shared & self.fixtures.keys())))

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

    def _importing(self, file: str) -> set[str]:
        """The test files that import ``file``: they see the data that it makes when it is imported, and run no line."""
        name = re.compile(rf"\b{re.escape(file.removesuffix('.py').replace('/', '.'))}\b")
        paths = {test_file: self._tree / test_file for test_file in self.test_files}
        return {test_file for test_file, path in paths.items() if path.is_file() and name.search(path.read_text())}

    def _read_contexts(self, file: str) -> dict[int, list[str]]:
        return self._lines.contexts_by_lineno(file)


def record(tests: Sequence[str], jobs: int, folder: Path = CACHE, *, again: bool = False) -> int:
    """Run the files of ``tests`` that have no recording, or ``again`` all, in a copy of the tree.

    Each FILES_OF_A_PIECE of them are written to ``folder`` when they have run, so an interrupted recording can go on.
    Tests that fail are left out. Returns the largest exit status of pytest.
    """
    known = Recording(folder, ROOT) if _pieces(folder) else None
    paths = [path for test in tests for path in (sorted((ROOT / test).rglob("test_*.py")) or [ROOT / test])]
    files = [str(path.relative_to(ROOT)) for path in dict.fromkeys(paths)]
    waiting = [file for file in files if again or known is None or not known.has(file)]
    status = 0
    with copied_tree() as tree:
        for start in range(0, len(waiting), FILES_OF_A_PIECE):
            status = max(status, _record_piece(waiting[start : start + FILES_OF_A_PIECE], jobs, tree, folder))
    return status


def _record_piece(test_files: Sequence[str], jobs: int, tree: Path, folder: Path) -> int:
    with TemporaryDirectory() as parts:
        packages = os.pathsep.join(filter(None, [str(tree / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1", FOLDER: parts}
        options = [
            "-q",
            "-n",
            str(jobs),
            "--dist",
            "worksteal",
            "-p",
            "no:randomly",
            "-p",
            "tools.quality.mutate.recorder",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *test_files], cwd=tree, env=environment, check=False
        )
        merge(Path(parts), tree, test_files, folder)
    return done.returncode


def merge(parts: Path, tree: Path, test_files: Sequence[str], folder: Path) -> None:
    """Add what all processes left in ``parts`` to ``folder``, and remove pieces whose test files it replaces."""
    recorded = [json.loads(part.read_text()) for part in parts.glob("tests-*.json")]
    earlier = _pieces(folder)
    piece = folder / f"{int(earlier[-1].name) + 1 if earlier else 0:04}"
    piece.mkdir(parents=True)
    lines = CoverageData(str(piece / "lines"))
    for part in sorted(parts.glob("lines.*")):
        data = CoverageData(str(part))
        data.read()
        lines.update(data, map_path=lambda path: os.path.relpath(path, tree))
    files = [path for top in TOPS for path in (tree / top).rglob("*.py")]
    content = {
        "tests": {name: test for part in recorded for name, test in part["tests"].items()},
        "fixtures": {name: seconds for part in recorded for name, seconds in part["fixtures"].items()},
        "files": {str(path.relative_to(tree)): _digest(path) for path in sorted(files)},
        "test files": {file: _digest(tree / file) for file in test_files},
    }
    (piece / "tests.json").write_text(json.dumps(content))
    newer = set(test_files)
    for old in reversed(earlier):
        own = json.loads((old / "tests.json").read_text())["test files"].keys()
        if own <= newer:
            shutil.rmtree(old)
        newer |= own


def _pieces(folder: Path) -> list[Path]:
    """The folders of complete pieces, oldest first."""
    return sorted(file.parent for file in folder.glob("*/tests.json"))


def _module(test: str) -> str:
    return test.partition("::")[0]


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""

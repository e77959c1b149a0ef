"""Judge mutants in a copy of the tree, so that an interrupted run leaves the checkout unchanged."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from tools.quality.mutate.mutants import ROOT, Mutant

_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "built", "build", "dist"
)

_OPTIONS = ("-n", "0", "-p", "no:randomly", "--hypothesis-seed=0")  # of pytest


class Verdict(StrEnum):
    SEEN = "seen"
    HANGS = "seen, tests hang"
    UNSEEN = "not seen"
    UNCOVERED = "no test runs it"
    BROKEN = "its tests fail without it"
    SLOW = "its tests hang without it"

    @property
    def is_seen(self) -> bool:
        return self in (Verdict.SEEN, Verdict.HANGS)


class Lab:
    """A copy of the tree, and the interpreter for its tests. ``broken``: tests that fail without any mutant."""

    def __init__(self, tree: Path, python: Path) -> None:
        self.tree = tree
        self.broken: set[str] = set()
        self._python = python
        self._sound: set[str] = set()

    def judge(self, mutant: Mutant) -> Verdict:
        """Run the tests of ``mutant`` with it, and those that fail also without it, unless their result is known."""
        if not mutant.tests:
            return Verdict.UNCOVERED
        with mutant.applied(self.tree):
            failed = self._failed(mutant, mutant.tests, planted=True)
        if failed is None:
            return Verdict.UNSEEN
        unknown = [test for test in failed or mutant.tests if test not in self._sound or not failed]
        if unknown and (broken := self._failed(mutant, unknown)) is not None:
            self.broken.update(broken)
            return Verdict.BROKEN if broken else Verdict.SLOW
        self._sound.update(failed)
        return Verdict.SEEN if failed else Verdict.HANGS

    def judge_with_sound_tests(self, mutant: Mutant) -> Verdict:
        """Judge ``mutant`` by those of its tests that pass without it."""
        while (verdict := self.judge(mutant)) is Verdict.BROKEN:
            files = {test for test in self.broken if "::" not in test}  # their collection failed
            sound = [test for test in mutant.tests if test not in self.broken and test.split("::")[0] not in files]
            if len(sound) == len(mutant.tests):
                return verdict
            mutant = replace(mutant, tests=tuple(sound))
        return verdict

    def _failed(self, mutant: Mutant, tests: Sequence[str], *, planted: bool = False) -> list[str] | None:
        """Run ``tests`` up to the first failure. Return the ids that failed, or None if all passed.

        The list is empty if the tests took too long. It is ``tests`` if pytest itself cannot start, because of the
        ``planted`` mutant: conftest.py may import it.
        """
        # Bytecode is identified by size and seconds: a quick replacement of equal length would not be compiled.
        packages = os.pathsep.join(filter(None, [str(self.tree / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
        with tempfile.TemporaryDirectory() as folder:
            options = ["-q", "-x", "-o", f"cache_dir={folder}", "--basetemp", f"{folder}/tests", *_OPTIONS]
            command = [str(self._python), "-m", "pytest", *options, *tests]
            output = Path(folder) / "output"
            with output.open("w") as out:  # a pipe would stay open in processes that the tests leave running
                code = _run(command, self.tree, environment, out.fileno(), mutant.limit_s)
            if code is None:
                return []
            if code == 0:
                return None
            failures = Path(folder) / "v" / "cache" / "lastfailed"
            if failures.is_file():
                return [test for test in json.loads(failures.read_text()) if test]  # "": the collection
            if code in (4, 5) and not planted:  # pytest found no such tests
                raise RuntimeError(f"{mutant.name}: its tests must run, got\n{output.read_text()}")
            return list(tests)  # the process crashed, or never came to a test


def _run(command: Sequence[str], folder: Path, environment: dict[str, str], out: int, limit_s: float) -> int | None:
    """Return the exit status, or None past the limit. The processes of the tests end with them."""
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A temporary copy of the tree, without built files and history."""
    with tempfile.TemporaryDirectory(prefix="tandemrt-mutants-") as folder:
        tree = Path(folder).resolve() / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=_NOT_COPIED)
        yield tree

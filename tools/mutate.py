"""Put small bugs into a copy of the tree, one at a time, and see whether the tests notice.

    python -m tools.mutate --list
    python -m tools.mutate --only top-k-off-by-one
    python -m tools.mutate --jobs 8

The bugs are in ``tools/mutants/*.toml``. The tests of each run twice at most: once without any bug, because a test that
fails by itself sees nothing, and once with it. The exit code is 1 if a bug that matters went unseen or does not apply.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
LIST = ROOT / "tools" / "mutants"
LIMIT_S = 1200.0  # a bug may make a test run for ever
_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "built", "build", "dist"
)


class Verdict(StrEnum):
    SEEN = "seen"
    UNSEEN = "not seen"
    MISFIT = "does not apply"
    BROKEN = "its tests fail without it"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Mutant:
    """A small bug.

    Attributes:
        name: unique in the whole list.
        file: what it changes, relative to the root of the tree.
        text: occurs exactly once in that file.
        becomes: what takes its place.
        tests: pytest's arguments, relative to the root, of the tests that should see it.
        means: what is wrong then, in one line.
        harmless: why nobody could see it, or need not; empty for a bug that matters.
        served: the tests need a Triton server, and so the environment that has one.
    """

    name: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]
    means: str
    harmless: str = ""
    served: bool = False

    def times(self, tree: Path) -> int:
        """How often ``text`` occurs in the file; a mutant applies where that is once."""
        path = tree / self.file
        return path.read_text().count(self.text) if path.is_file() else 0

    @contextmanager
    def applied(self, tree: Path) -> Iterator[None]:
        """Put the bug into ``tree`` for as long as the block lasts."""
        path = tree / self.file
        content = path.read_text()
        path.write_text(content.replace(self.text, self.becomes))
        try:
            yield
        finally:
            path.write_text(content)


def read_mutants(folder: Path = LIST) -> list[Mutant]:
    """Return the list, in the order of its files. Raises TypeError for an entry with other fields than a Mutant's."""
    entries = [entry for file in sorted(folder.glob("*.toml")) for entry in tomllib.loads(file.read_text())["mutant"]]
    return [Mutant(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]


class Lab:
    """A copy of the tree and the interpreters to run its tests with; ``served`` None: no server on this machine."""

    def __init__(self, tree: Path, python: Path, served: Path | None) -> None:
        self.tree = tree
        self._pythons = {False: python, True: served}
        self._sound: dict[tuple[str, ...], bool] = {}

    def judge(self, mutant: Mutant) -> Verdict:
        """Run the tests of ``mutant`` without it, unless that is known, and with it."""
        if mutant.times(self.tree) != 1 or mutant.text == mutant.becomes:
            return Verdict.MISFIT
        if self._pythons[mutant.served] is None:
            return Verdict.NOT_RUN
        if mutant.tests not in self._sound:
            self._sound[mutant.tests] = self._passes(mutant)
        if not self._sound[mutant.tests]:
            return Verdict.BROKEN
        with mutant.applied(self.tree):
            return Verdict.UNSEEN if self._passes(mutant) else Verdict.SEEN

    def _passes(self, mutant: Mutant) -> bool:
        command = [str(self._pythons[mutant.served]), "-m", "pytest", "-q", "-x", *_options(mutant), *mutant.tests]
        # Bytecode is told by size and whole seconds: a bug of the same length, put in soon, would not be compiled.
        packages = os.pathsep.join(filter(None, [str(self.tree / "src"), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=self.tree, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        if done.returncode not in (0, 1, 2):  # 1: a test failed, 2: one could not even be collected
            raise RuntimeError(f"{mutant.name}: its tests must run, got\n{done.stdout}{done.stderr}")
        return done.returncode == 0


@contextmanager
def copied_tree() -> Iterator[Path]:
    """A temporary copy of the tree, without what was built, and without its history."""
    with tempfile.TemporaryDirectory(prefix="tandemrt-mutants-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=_NOT_COPIED)
        yield tree


def environment_of(tree: Path, python: Path) -> Path:
    """Make an environment beside ``tree`` that is the one of ``python``, with ``tree`` for the installed package.

    Triton's stub does not read PYTHONPATH: it imports what the environment holds. Returns the new one's Python.
    """
    home, theirs = tree.parent / "environment", python.absolute().parents[1]
    [site] = theirs.glob("lib/python*/site-packages")
    mine = home / site.relative_to(theirs)
    mine.mkdir(parents=True)
    for entry in site.iterdir():
        if not entry.name.startswith("__editable__"):
            (mine / entry.name).symlink_to(entry)
    (mine / "tree.pth").write_text(f"{tree / 'src'}\n")
    shutil.copy2(theirs / "pyvenv.cfg", home)
    (home / "bin").mkdir()
    for name in ("python", "python3"):  # the stub looks for the second on its PATH
        (home / "bin" / name).symlink_to(python.resolve())
    return home / "bin" / "python"


def main(
    only: Annotated[list[str] | None, typer.Option(help="Only these mutants; a part of the name is enough.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Copies of the tree in which tests run side by side.")] = 1,
    listed: Annotated[bool, typer.Option("--list", help="Name the mutants and run nothing.")] = False,
    serve_python: Annotated[Path, typer.Option(help="Python of the environment with a Triton server.")] = ROOT
    / ".venv-serve/bin/python",
) -> None:
    """Run the tests of every mutant with it, and report which were noticed."""
    console = Console(highlight=False)
    mutants = [m for m in read_mutants() if not only or any(part in m.name for part in only)]
    if not mutants:
        console.print(f"--only: must be part of a mutant's name, received {only}; --list names them")
        raise typer.Exit(2)
    if listed:
        console.print(_table([(mutant, mutant.harmless) for mutant in mutants], "harmless because"))
        return
    verdicts: dict[str, Verdict] = {}

    def work(share: Sequence[Mutant]) -> None:
        with copied_tree() as tree:
            served = environment_of(tree, serve_python) if serve_python.is_file() else None
            lab = Lab(tree, Path(sys.executable), served)
            for mutant in share:
                start = time.perf_counter()
                verdict = verdicts[mutant.name] = lab.judge(mutant)
                console.print(f"{verdict:<26}{mutant.name}  ({time.perf_counter() - start:.0f} s)")

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(work, shares(mutants, jobs)))
    if not _report(console, mutants, verdicts):
        raise typer.Exit(1)


def shares(mutants: Sequence[Mutant], jobs: int) -> list[list[Mutant]]:
    """Divide ``mutants`` among at most ``jobs`` shares of like size; those of the same tests stay together."""
    groups: dict[tuple[str, ...], list[Mutant]] = {}
    for mutant in mutants:
        groups.setdefault(mutant.tests, []).append(mutant)
    divided: list[list[Mutant]] = [[] for _ in range(min(jobs, len(groups)))]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(divided, key=len).extend(group)
    return divided


def _options(mutant: Mutant) -> list[str]:
    # The environment of the server has none of these plugins.
    return [] if mutant.served else ["-n", "0", "-p", "no:randomly", "--hypothesis-seed=0"]


def _report(console: Console, mutants: Sequence[Mutant], verdicts: dict[str, Verdict]) -> bool:
    """Print what was not noticed and the share that was; whether all is well."""
    run = [m for m in mutants if verdicts[m.name] is not Verdict.NOT_RUN]
    matter = [m for m in run if not m.harmless]
    seen = sum(verdicts[m.name] is Verdict.SEEN for m in matter)
    missed = [m for m in run if verdicts[m.name] is not Verdict.SEEN]
    if missed:
        console.print(_table([(m, m.harmless or str(verdicts[m.name])) for m in missed], "why"))
    share = f" ({seen / len(matter):.2f})" if matter else ""
    console.print(f"{seen} of {len(matter)} that matter were seen{share}; {len(run) - len(matter)} matter to nobody")
    if len(run) < len(mutants):
        console.print(f"{len(mutants) - len(run)} need a Triton server and were not run; see --serve-python")
    return seen == len(matter) and not any(verdicts[m.name] in (Verdict.MISFIT, Verdict.BROKEN) for m in run)


def _table(rows: Sequence[tuple[Mutant, str]], heading: str) -> Table:
    table = Table("name", "file", "what is wrong then", heading, show_edge=False)
    for mutant, remark in rows:
        table.add_row(mutant.name, mutant.file, mutant.means, remark)
    return table


if __name__ == "__main__":
    typer.run(main)

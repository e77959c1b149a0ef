"""The list of small bugs (``python -m tools.mutate``): every one still applies, and names tests that exist."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tools.mutate import ROOT, Lab, Mutant, Verdict, read_mutants, shares

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_a_mutant_occurs_exactly_once_and_is_changed(mutant: Mutant) -> None:
    assert mutant.times(ROOT) == 1
    assert mutant.becomes != mutant.text
    changed = (ROOT / mutant.file).read_text().replace(mutant.text, mutant.becomes)
    compile(changed, mutant.file, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_of_a_mutant_exist(mutant: Mutant) -> None:
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (ROOT / file).read_text()


def test_every_mutant_has_a_name_of_its_own_and_says_what_is_wrong() -> None:
    assert [name for name, times in Counter(mutant.name for mutant in MUTANTS).items() if times > 1] == []
    assert all(mutant.means for mutant in MUTANTS)


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    (tmp_path / "adding.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_sum.py").write_text("from adding import add\n\ndef test_sum():\n    assert add(2, 2) == 4\n")
    (tmp_path / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    return Lab(tmp_path, Path(sys.executable), None)


MUTANT = Mutant("less", "adding.py", "a + b", "a - b", ("test_sum.py",), "sums are differences")


def test_a_mutant_is_judged_by_its_tests_and_leaves_the_tree_as_it_was(lab: Lab) -> None:
    verdicts = [
        lab.judge(MUTANT),
        lab.judge(replace(MUTANT, becomes="a * b")),
        lab.judge(replace(MUTANT, text="a % b")),
        lab.judge(replace(MUTANT, tests=("test_wrong.py",))),
        lab.judge(replace(MUTANT, served=True)),
    ]
    assert verdicts == [Verdict.SEEN, Verdict.UNSEEN, Verdict.MISFIT, Verdict.BROKEN, Verdict.NOT_RUN]
    assert (lab.tree / "adding.py").read_text() == "def add(a, b):\n    return a + b\n"


@pytest.mark.parametrize("jobs", [1, 3, 1000])
def test_shares_hold_every_mutant_once_and_those_of_the_same_tests_together(jobs: int) -> None:
    divided = shares(MUTANTS, jobs)
    assert len(divided) <= jobs
    assert sorted(mutant.name for share in divided for mutant in share) == sorted(m.name for m in MUTANTS)
    homes = {(mutant.tests, index) for index, share in enumerate(divided) for mutant in share}
    assert len(homes) == len({mutant.tests for mutant in MUTANTS})


def test_tests_that_cannot_run_are_no_verdict(lab: Lab) -> None:
    with pytest.raises(RuntimeError, match="less: its tests must run"):
        lab.judge(replace(MUTANT, tests=("test_nowhere.py",)))


def test_a_name_that_no_mutant_has_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.mutate", "--only", "no-such-bug"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "--only: must be part of a mutant's name, received ['no-such-bug']" in " ".join(done.stdout.split())

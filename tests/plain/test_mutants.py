"""The list of small bugs (``python -m tools.mutate listed``) still applies, and names tests that exist."""

import subprocess
import sys
from collections import Counter

import pytest

from tools.mutate.mutants import ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_text_of_a_mutant_occurs_exactly_once_and_is_changed(mutant: Mutant) -> None:
    changed = mutant.changed((ROOT / mutant.file).read_text())
    assert changed is not None
    compile(changed, mutant.file, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_of_a_mutant_exist(mutant: Mutant) -> None:
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("[")[0].partition("::")
        assert f"def {name}" in (ROOT / file).read_text()


def test_every_mutant_has_its_own_name_and_a_description() -> None:
    assert [name for name, times in Counter(mutant.name for mutant in MUTANTS).items() if times > 1] == []
    assert all(mutant.means for mutant in MUTANTS)


def test_a_name_that_no_mutant_has_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.mutate", "listed", "--only", "no-such-bug"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 2
    assert "--only: must be part of a mutant's name, received ['no-such-bug']" in " ".join(done.stdout.split())

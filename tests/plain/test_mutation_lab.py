"""A mutant is judged by its tests, in a tree that stays as it was."""

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tools.quality.mutate import lab as lab_module
from tools.quality.mutate.lab import Lab, Verdict
from tools.quality.mutate.mutants import Mutant
from tools.quality.mutate.report import report
from tools.quality.mutate.results import Results


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setattr(lab_module, "_OPTIONS", ())  # a process starts in half of the time without their plugins
    (tmp_path / "adding.py").write_text(SOURCE)
    (tmp_path / "test_sum.py").write_text("from adding import add\n\ndef test_sum():\n    assert add(2, 2) == 4\n")
    (tmp_path / "test_wrong.py").write_text("def test_wrong():\n    assert False\n")
    return Lab(tmp_path, Path(sys.executable))


OPTIONS = lab_module._OPTIONS
SOURCE = "def add(a, b):\n    return a + b\n"
MUTANT = Mutant("less", "adding.py", "a + b", "a - b", ("test_sum.py",), SOURCE.index("a + b"))


def test_a_mutant_is_judged_by_its_tests_and_leaves_the_tree_as_it_was(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab_module, "_OPTIONS", OPTIONS)
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin,_hypothesis_pytestplugin")
    verdicts = [
        lab.judge(MUTANT),
        lab.judge(replace(MUTANT, becomes="a * b")),
        lab.judge(replace(MUTANT, tests=("test_wrong.py",))),
    ]
    assert verdicts == [Verdict.SEEN, Verdict.UNSEEN, Verdict.BROKEN]
    assert (lab.tree / "adding.py").read_text() == SOURCE


def test_a_sampled_mutant_changes_its_place_only(lab: Lab) -> None:
    source = "def other(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n"
    (lab.tree / "adding.py").write_text(source)
    assert lab.judge(replace(MUTANT, start=source.index("a + b"))) is Verdict.UNSEEN
    assert lab.judge(replace(MUTANT, start=source.rindex("a + b"))) is Verdict.SEEN
    with pytest.raises(ValueError, match="less: the tree must not change"):
        lab.judge(replace(MUTANT, start=source.rindex("a + b") + 1))


def test_a_mutant_without_tests_is_not_covered(lab: Lab) -> None:
    assert lab.judge(replace(MUTANT, tests=())) is Verdict.UNCOVERED


def test_a_mutant_that_makes_tests_hang_is_seen_and_ends(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    (lab.tree / "adding.py").write_text("import time\ndef add(a, b):\n    time.sleep(0)\n    return a + b\n")
    run = lab_module._run

    def hurried(*arguments: Any) -> int | None:  # with the bug only: a busy machine starts the tests slowly
        hangs = "sleep(10_000)" in (lab.tree / "adding.py").read_text()
        return run(*arguments[:-1], 1.0 if hangs else arguments[-1])

    monkeypatch.setattr(lab_module, "_run", hurried)
    assert lab.judge(replace(MUTANT, text="sleep(0)", becomes="sleep(10_000)", start=36)) is Verdict.HANGS
    assert "sleep(0)" in (lab.tree / "adding.py").read_text()


def test_tests_that_hang_without_the_mutant_are_no_verdict(lab: Lab) -> None:
    (lab.tree / "test_wrong.py").write_text("import time\n\n\ndef test_wrong():\n    time.sleep(10_000)\n")
    assert lab.judge(replace(MUTANT, tests=("test_wrong.py",), limit_s=1.0)) is Verdict.SLOW


def test_sound_tests_judge_where_others_fail_without_the_mutant(lab: Lab) -> None:
    (lab.tree / "test_broken.py").write_text("import nothing_of_this_name\n")
    tests = ("test_broken.py::test_a", "test_wrong.py::test_wrong", "test_sum.py::test_sum")
    assert lab.judge_with_sound_tests(replace(MUTANT, tests=tests)) is Verdict.SEEN
    assert lab.judge_with_sound_tests(replace(MUTANT, tests=tests, becomes="a * b")) is Verdict.UNSEEN
    assert lab.judge_with_sound_tests(replace(MUTANT, tests=tests[:2])) is Verdict.UNCOVERED
    assert lab.broken == {"test_broken.py", "test_wrong.py::test_wrong"}


def test_a_mutant_that_ends_the_process_of_the_tests_is_seen(lab: Lab) -> None:
    assert lab.judge(replace(MUTANT, becomes="__import__('os').abort()")) is Verdict.SEEN


def test_a_mutant_with_which_a_module_cannot_be_imported_is_seen(lab: Lab) -> None:
    broken = replace(MUTANT, becomes="a + b\n1 / 0", tests=("test_sum.py::test_sum",))
    assert lab.judge(broken) is Verdict.SEEN


def test_a_mutant_with_which_pytest_cannot_start_is_seen(lab: Lab) -> None:
    (lab.tree / "conftest.py").write_text("import adding\n")
    assert lab.judge(replace(MUTANT, becomes="a + b\n1 / 0")) is Verdict.SEEN


def test_the_share_of_a_sample_leaves_out_what_no_test_runs() -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    files = ("engines/text/a.py", "engines/text/b.py", "engines/c.py", "runtime/d/e/f.py")
    mutants = [replace(MUTANT, name=file, file=file) for file in files]
    verdicts = dict(zip(files, (Verdict.SEEN, Verdict.UNSEEN, Verdict.UNCOVERED, Verdict.SEEN), strict=True))
    assert report(console, mutants, verdicts) == pytest.approx(2 / 3)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["engines/text", "│", "1", "│", "1", "│", "0.50", "│", "0"] in lines
    assert ["engines", "│", "0", "│", "0", "│", "-", "│", "1"] in lines
    assert ["runtime/d", "│", "1", "│", "0", "│", "1.00", "│", "0"] in lines
    assert ["all", "│", "2", "│", "1", "│", "0.67", "│", "1"] in lines
    assert any("engines/text/b.py: 'a + b' -> 'a - b'" in " ".join(line) for line in lines)


def test_tests_that_cannot_run_are_no_verdict(lab: Lab) -> None:
    with pytest.raises(RuntimeError, match="less: its tests must run"):
        lab.judge(replace(MUTANT, tests=("test_nowhere.py",)))


def test_a_continued_run_judges_what_was_not_found(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    bugs = [replace(MUTANT, becomes=f"a - {number} * b") for number in range(4)]
    for bug, verdict in zip(bugs, (Verdict.SEEN, Verdict.HANGS, Verdict.UNSEEN, Verdict.UNCOVERED), strict=True):
        Results(file).add(bug, verdict)
    again = [*bugs, replace(MUTANT, name="elsewhere")]
    assert [Results(file).detection(bug) for bug in again] == [Verdict.SEEN, Verdict.HANGS, None, None, None]
    assert Results(None).detection(bugs[0]) is None

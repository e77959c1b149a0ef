"""The recording of ``python -m tools.quality.mutate record``: which tests run which line."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools.quality.mutate.mutants import ROOT
from tools.quality.mutate.operators import Edit, edits
from tools.quality.mutate.recorder import FOLDER
from tools.quality.mutate.recording import NoRecording, RecordedTest, Recording, merge

CODE = """\
LIMIT = 3


def add(a, b):
    return a + b


def built():
    return 1


def in_a_process():
    return 2


def never():
    return 4


def limited(a):
    return a < LIMIT


def table(first):
    return [first, 5]


TABLE = table(6)
"""
TESTS = """\
import subprocess
import sys
import pytest
import a


@pytest.fixture(scope="session")
def shared():
    return a.built()


@pytest.mark.parametrize("n", range(3))
def test_add(n):
    assert a.add(n, 1) == n + 1


def test_first(shared):
    assert shared == 1


def test_second(shared):
    assert shared > 0


def test_process():
    subprocess.run([sys.executable, "-c", "import a; a.in_a_process()"], check=True)


def test_limited():
    assert a.limited(2)


def test_wrong():
    assert a.add(1, 1) == 3
"""
OF_THE_TABLE = """\
from a import TABLE  # engines.a: the folder is on the path


def test_table():
    assert TABLE == [6, 5]
"""


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tree and its recording."""
    tree = tmp_path_factory.mktemp("tree").resolve()
    parts = tmp_path_factory.mktemp("parts")
    (tree / "engines").mkdir()
    (tree / "engines" / "a.py").write_text(CODE)
    (tree / "test_a.py").write_text(TESTS)
    (tree / "test_table.py").write_text(OF_THE_TABLE)
    (tree / "pytest.ini").write_text("[pytest]\naddopts = -p no:langsmith_plugin\n")
    environment = {**os.environ, FOLDER: str(parts), "PYTHONPATH": os.pathsep.join([str(ROOT), str(tree / "engines")])}
    environment["PYTHONPATH"] += os.pathsep + str(ROOT / "src")
    command = ["-m", "pytest", "-q", "-n", "2", "-p", "no:randomly", "-p", "tools.quality.mutate.recorder"]
    done = subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert "1 failed, 8 passed" in done.stdout, done.stdout + done.stderr
    merge(parts, tree, ["test_a.py", "test_table.py"], tree / "recording")
    return tree, tree / "recording"


def first_edit() -> Edit:
    """A bug in what ``test_add`` runs."""
    return next(edit for edit in edits(CODE) if edit.line == 5)


def running(recording: Recording, text: str, replaced: str) -> list[str]:
    """The tests that run the bug that changes ``replaced`` in the first line with ``text``."""
    line = next(number for number, each in enumerate(CODE.splitlines(), 1) if text in each)
    edit = next(edit for edit in edits(CODE) if edit.line == line and edit.text == replaced)
    return [test.id.removeprefix("test_a.py::") for test in recording.tests_of("engines/a.py", edit)]


def test_the_tests_of_a_line_run_it_and_pass(recorded: tuple[Path, Path]) -> None:
    tree, folder = recorded
    recording = Recording(folder, tree)
    assert running(recording, "return a + b", "+") == ["test_add[0]", "test_add[1]", "test_add[2]"]
    assert running(recording, "return 4", "4") == []


def test_every_test_with_a_shared_fixture_runs_its_lines(recorded: tuple[Path, Path]) -> None:
    assert running(Recording(recorded[1], recorded[0]), "return 1", "1") == ["test_first", "test_second"]


def test_the_processes_that_a_test_starts_are_recorded(recorded: tuple[Path, Path]) -> None:
    assert running(Recording(recorded[1], recorded[0]), "return 2", "2") == ["test_process"]


def test_the_tests_of_a_constant_run_lines_with_its_name(recorded: tuple[Path, Path]) -> None:
    assert "test_limited" in running(Recording(recorded[1], recorded[0]), "LIMIT = 3", "3")
    assert "test_first" not in running(Recording(recorded[1], recorded[0]), "return a < LIMIT", "<")


@pytest.mark.parametrize(("text", "replaced"), [("return [first, 5]", "5"), ("TABLE = table(6)", "6")])
def test_the_tests_of_what_runs_at_import_are_those_of_files_that_import_it(
    recorded: tuple[Path, Path], text: str, replaced: str
) -> None:
    """They see a table, and run none of the lines that make it."""
    tests = running(Recording(recorded[1], recorded[0]), text, replaced)
    assert "test_table.py::test_table" in tests
    assert "test_wrong" not in tests


def test_a_file_that_has_changed_since_has_the_tests_of_all_its_lines(
    recorded: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "engines").mkdir()
    (tmp_path / "engines" / "a.py").write_text("# a comment\n" + CODE)
    tests = running(Recording(recorded[1], tmp_path), "return 4", "4")
    assert {"test_add[0]", "test_first", "test_process", "test_limited"} <= set(tests)
    assert "test_wrong" not in tests


def test_the_time_is_kept(recorded: tuple[Path, Path]) -> None:
    tree, folder = recorded
    recording = Recording(folder, tree)
    edit = first_edit()
    tests = recording.tests_of("engines/a.py", edit)
    ids, seconds = recording.chosen(tests, 1e6)
    assert sorted(ids) == ["test_a.py::test_add[0]", "test_a.py::test_add[1]", "test_a.py::test_add[2]"]
    assert seconds >= sum(test.seconds for test in tests)
    assert len(recording.chosen(tests, 0.0)[0]) == 1
    everywhere = replace(edit, runs=(1, len(CODE.splitlines())))
    assert len(recording.chosen(recording.tests_of("engines/a.py", everywhere), 1e6)[0]) == 8


def test_near_tests_come_first_and_each_function_has_as_much_time(recorded: tuple[Path, Path]) -> None:
    tree, folder = recorded
    recording = Recording(folder, tree)
    distances = {test.id: test.distance for test in recording.tests_of("engines/a.py", first_edit())}
    assert distances == {f"test_a.py::test_add[{n}]": 2 for n in range(3)}  # "import a" does not name engines.a
    constant = next(edit for edit in edits(CODE) if edit.text == "6")
    for names, distance in ((("table",), 0), (("TABLE",), 1), (("able",), 1)):
        tests = recording.tests_of("engines/a.py", replace(constant, names=names))
        assert {test.distance for test in tests if test.id == "test_table.py::test_table"} == {distance}
    table = [RecordedTest(f"b.py::table[{n}]", 0.001, frozenset()) for n in range(40)]
    slow = [RecordedTest(f"{file}.py::slow[{n}]", 1.0, frozenset()) for n in range(2) for file in "ab"]
    imports = [RecordedTest(f"c.py::own[{n}]", 2.0, frozenset(), distance=1) for n in range(2)]
    chosen = Recording(folder, tree).chosen
    own = [test.id for test in imports]
    assert chosen([*slow, *table, *imports], 4.1)[0] == [*own, *(test.id for test in table[:7])]
    ids, _ = chosen([*slow, *table], 2.6)  # the whole table, and one case of each slow function
    assert [each for each in ids if "table" in each] == [test.id for test in table]
    assert sorted({*ids} - {test.id for test in table}) == ["a.py::slow[0]", "b.py::slow[0]"]
    assert ids[-1] == "a.py::slow[0]"  # a file's tests stay together


def test_a_slow_fixture_does_not_take_the_time_of_tests_without_one(
    recorded: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(recorded[1], recorded[0])
    monkeypatch.setattr(recording, "_fixtures", {"bundle": 5.0})
    quick = [RecordedTest("a.py::needs", 0.001, frozenset({"bundle"}))]
    others = [RecordedTest(f"b.py::other{n}", 0.1, frozenset()) for n in range(40)]
    ids, seconds = recording.chosen([*quick, *others], 5.0)
    assert ids == [test.id for test in others]
    assert seconds == pytest.approx(40 * 0.11)
    assert "a.py::needs" in recording.chosen([*quick, *others], 10.0)[0]
    many = [RecordedTest(f"a.py::needs{n}", 0.001, frozenset({"bundle"})) for n in range(100)]
    assert recording.chosen([*many, *others], 6.5)[0][:100] == [test.id for test in many]  # it is worth its time


def test_the_newest_recording_of_a_test_file_counts(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    tree, folder = recorded
    shutil.copytree(folder, tmp_path / "recording")
    (other := tmp_path / "other").mkdir()
    (other / "tests-1.json").write_text('{"tests": {}, "fixtures": {}}')
    merge(other, tree, ["test_b.py"], tmp_path / "recording")
    recording = Recording(tmp_path / "recording", tree)
    assert running(recording, "return 1", "1") == ["test_first", "test_second"]
    assert [recording.has(file) for file in ("test_a.py", "test_b.py", "test_c.py")] == [True, True, False]
    merge(other, tree, ["test_a.py", "test_table.py"], tmp_path / "recording")
    assert running(Recording(tmp_path / "recording", tree), "return 1", "1") == []
    assert [piece.name for piece in sorted((tmp_path / "recording").iterdir())] == ["0001", "0002"]


def test_a_test_file_that_has_changed_is_not_recorded(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(TESTS + "\n")
    assert not Recording(recorded[1], tmp_path).has("test_a.py")


def test_without_a_recording_the_error_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(NoRecording, match=r"run python -m tools\.quality\.mutate record"):
        Recording(tmp_path, tmp_path)

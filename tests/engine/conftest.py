"""What the tests of this folder share: the command line, and a clock that goes as a test wants it."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandemrt.cli import main
from tests.waiting import Clock

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in the module's ``folder``; gives exit code, standard output and standard error."""
    monkeypatch.chdir(folder)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tandemrt", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return int(caught.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def clock() -> Iterator[Clock]:
    """The runtime's clock, in the hands of the test."""
    with pytest.MonkeyPatch.context() as patched:
        yield Clock(patched)

"""What the tests of this folder share: the command line, a quick compiler of kernels, and a clock in a test's hands."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandemrt.cli import main
from tandemrt.plugins.kernels import nvrtc
from tests.waiting import Clock

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session", autouse=True)
def quick_compiler() -> Iterator[None]:
    """Let NVRTC optimize little: no GPU runs the kernels of these tests, and it takes a quarter of the time."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(nvrtc, "_OPTIONS", (*nvrtc._OPTIONS, "--Ofast-compile=max"))
        yield


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

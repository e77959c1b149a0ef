"""Progress on a terminal."""

import io

import pytest

from tandemrt.runtime.llm.progress import LARGE, spinner


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("size", "stderr", "shown"),
    [(LARGE - 1, Terminal(), False), (LARGE, Terminal(), True), (LARGE, io.StringIO(), False)],
)
def test_a_spinner_is_shown_on_a_terminal_while_large_weights_open(
    size: int, stderr: io.StringIO, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", stderr)
    with spinner("opening weights", size):
        pass
    assert ("opening weights, 1.1 GB" in stderr.getvalue()) == shown

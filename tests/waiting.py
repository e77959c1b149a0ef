"""Waiting in tests, independent of how busy the machine is."""

import signal
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

PATIENCE_S = 120.0  # longer than every limit under test: a wait past this is a hang on any machine


def eventually(holds: Callable[[], bool]) -> bool:
    """Return whether ``holds`` becomes true within PATIENCE_S."""
    end = time.perf_counter() + PATIENCE_S
    while time.perf_counter() < end:
        if holds():
            return True
        time.sleep(0.02)
    return holds()


def receive_interrupts() -> None:
    """Call in a child process before its program starts: a test run may have been started with signals ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Clock:
    """The clock of the runtime: real seconds plus ``ahead``; if ``stopped``, only ``ahead``.

    Other code keeps the real clock: an event loop of the tests in the same process would sleep until that time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        self.stopped = False
        seconds = SimpleNamespace(**vars(time) | {"monotonic": self._seconds})
        for name, module in list(sys.modules.items()):
            if name.startswith("tandemrt.") and getattr(module, "time", None) is time:
                monkeypatch.setattr(module, "time", seconds)

    def _seconds(self) -> float:
        return self.ahead + (0.0 if self.stopped else time.monotonic())

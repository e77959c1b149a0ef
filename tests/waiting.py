"""How tests wait: for what must happen, however busy the machine is."""

import sys
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

PATIENCE_S = 120.0  # no limit of anything that is tested: what takes longer hangs, on any machine


def eventually(holds: Callable[[], bool]) -> bool:
    """Whether ``holds`` comes true before it is clear that something hangs."""
    end = time.perf_counter() + PATIENCE_S
    while time.perf_counter() < end:
        if holds():
            return True
        time.sleep(0.02)
    return holds()


class Clock:
    """The seconds that the runtime reads: real ones and ``ahead``; with ``stopped``, nothing but ``ahead``.

    Of nobody else: an event loop that serves the tests in the same process would sleep until that time comes.
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

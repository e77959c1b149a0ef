"""How tests wait: for what must happen, however busy the machine is."""

import time
from collections.abc import Callable

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
    """The seconds that the runtime reads: real ones and ``ahead``; with ``stopped``, nothing but ``ahead``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ahead = 0.0
        self.stopped = False
        real = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: self.ahead + (0.0 if self.stopped else real()))

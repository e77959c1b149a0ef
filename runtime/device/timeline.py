"""Device time of each phase of a round, measured with CUDA events that are read later, without waiting."""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.metrics.metrics import Metrics


class Timeline:
    """Adds device time to ``Metrics.device_seconds``: of each phase, and of complete rounds under ``round``.

    A round lasts from the end of one verification to the end of the next one. The first round after a pause is not
    timed. Recording events costs time, so nothing is recorded unless ``enabled``.
    """

    def __init__(self, device: torch.device, metrics: Metrics, *, enabled: bool) -> None:
        self._enabled = enabled
        self._device = device_of(device)
        self._metrics = metrics
        self._round: list[tuple[str, Any, Any]] = []  # phases of this round: name, start, end
        self._open: deque[tuple[str, Any, Any]] = deque()  # of complete rounds, until the device has reached them
        self._last: Any = None  # the end of the last round

    def span(self, phase: str) -> AbstractContextManager[None]:
        """Attribute the work that the block enqueues to ``phase``."""
        return self._recorded(phase) if self._enabled else nullcontext()

    @contextmanager
    def _recorded(self, phase: str) -> Iterator[None]:
        start = self._device.timestamp()
        yield
        end = self._device.timestamp()
        self._round.append((phase, start, end))
        if phase == "verify":
            if self._last is not None:
                self._open.extend((*self._round, ("round", self._last, end)))
            self._round.clear()
            self._last = end

    def pause(self) -> None:
        """Stop timing until the next round, because the loop is idle."""
        self._last = None

    def collect(self) -> None:
        """Add the times of events that the device has reached to the metrics."""
        while self._open and self._device.has_passed(self._open[0][2]):
            phase, start, end = self._open.popleft()
            self._metrics.device_seconds[phase] += self._device.seconds_between(start, end)
            self._metrics.timed_rounds += phase == "round"

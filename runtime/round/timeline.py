"""When the device works, on what, and when it waits: events around the pieces of a round, read when they are over."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tandemrt.plugins.tensors import torch
from tandemrt.runtime.metrics import Metrics


class Timeline:
    """Adds the device's time to ``Metrics.device_seconds``, by piece, and that of whole rounds under ``round``.

    A round lasts from the end of one verification to the end of the next; the first one after a pause is not timed.
    The events cost a little, so a timeline is kept only where ``enabled``.
    """

    def __init__(self, device: torch.device, metrics: Metrics, *, enabled: bool) -> None:
        self._enabled = enabled
        self._cuda = device.type == "cuda"
        self._metrics = metrics
        self._round: list[tuple[str, Any, Any]] = []  # pieces of this round: name, start, end
        self._open: deque[tuple[str, Any, Any]] = deque()  # of whole rounds, to be read when they are over
        self._last: Any = None  # the end of the last round

    @contextmanager
    def span(self, piece: str) -> Iterator[None]:
        """What the block enqueues belongs to ``piece``."""
        if not self._enabled:
            yield
            return
        start = self._now()
        yield
        end = self._now()
        self._round.append((piece, start, end))
        if piece == "verify":
            if self._last is not None:
                self._open.extend((*self._round, ("round", self._last, end)))
            self._round.clear()
            self._last = end

    def pause(self) -> None:
        """There is nothing to do: the time until the next round is none of a round's."""
        self._last = None

    def collect(self) -> None:
        """Add up what is over by now."""
        while self._open and self._over(self._open[0][2]):
            piece, start, end = self._open.popleft()
            seconds = start.elapsed_time(end) / 1e3 if self._cuda else end - start
            self._metrics.device_seconds[piece] += seconds
            self._metrics.timed_rounds += piece == "round"

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _over(self, end: Any) -> bool:
        return not self._cuda or end.query()

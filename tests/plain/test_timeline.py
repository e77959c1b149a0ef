"""Begin and end of a round on the device, with a clock that the test sets."""

import time

import pytest
import torch

from tandemrt.runtime.device.timeline import Timeline
from tandemrt.runtime.metrics.metrics import Metrics


def test_idle_time_between_rounds_belongs_to_no_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    metrics = Metrics()
    timeline = Timeline(torch.device("cpu"), metrics, enabled=True)

    def round_of(target: float, verify: float, rest: float = 0.0) -> None:
        for phase, seconds in (("target", target), ("verify", verify)):
            now[0] += rest
            with timeline.span(phase):
                now[0] += seconds
        timeline.collect()

    round_of(3.0, 1.0)  # its beginning is unknown
    round_of(5.0, 2.0, rest=0.5)
    timeline.pause()
    now[0] += 3600.0
    round_of(7.0, 4.0)  # its beginning is unknown too
    round_of(8.0, 5.0, rest=0.25)
    assert metrics.timed_rounds == 2
    seconds = {phase: value for phase, value in metrics.device_seconds.items() if value}
    assert seconds == {"target": 13.0, "verify": 7.0, "round": 8.0 + 13.5}
    assert metrics.device_ms_per_round["idle"] == pytest.approx(1e3 * 1.5 / 2)

"""When a round begins and ends on the device, by a clock that the test sets."""

import time

import pytest
import torch

from tandemrt.runtime.metrics import Metrics
from tandemrt.runtime.round.timeline import Timeline


def test_what_lies_between_two_rounds_belongs_to_none_where_there_was_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    metrics = Metrics()
    timeline = Timeline(torch.device("cpu"), metrics, enabled=True)

    def round_of(target: float, verify: float, rest: float = 0.0) -> None:
        for piece, seconds in (("target", target), ("verify", verify)):
            now[0] += rest
            with timeline.span(piece):
                now[0] += seconds
        timeline.collect()

    round_of(3.0, 1.0)  # nobody knows when it began
    round_of(5.0, 2.0, rest=0.5)
    timeline.pause()
    now[0] += 3600.0
    round_of(7.0, 4.0)  # nor this one
    round_of(8.0, 5.0, rest=0.25)
    assert metrics.timed_rounds == 2
    seconds = {piece: value for piece, value in metrics.device_seconds.items() if value}
    assert seconds == {"target": 13.0, "verify": 7.0, "round": 8.0 + 13.5}
    assert metrics.device_ms_per_round["idle"] == pytest.approx(1e3 * 1.5 / 2)

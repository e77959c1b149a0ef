"""A histogram counts as in Prometheus, and its copies are immutable."""

import pytest

from tandemrt.runtime.metrics.histogram import Histogram
from tandemrt.runtime.metrics.metrics import DEVICE_PHASES, Metrics
from tandemrt.runtime.metrics.names import histograms


def observed(*values: float) -> Histogram:
    histogram = Histogram((1.0, 2.0))
    for value in values:
        histogram.observe(value)
    return histogram


@pytest.mark.parametrize(
    ("value", "counts"), [(0.5, [1, 0, 0]), (1.0, [1, 0, 0]), (1.5, [0, 1, 0]), (2.0, [0, 1, 0]), (2.5, [0, 0, 1])]
)
def test_a_value_on_a_bound_counts_below_it(value: float, counts: list[int]) -> None:
    histogram = observed(value)
    assert (histogram.counts, histogram.sum, histogram.count) == (counts, value, 1)


def test_the_bounds_of_every_histogram_increase() -> None:
    for name, histogram in histograms(Metrics()):
        assert list(histogram.buckets) == sorted(set(histogram.buckets)), name


def test_a_repeated_value_is_counted_and_reported_each_time() -> None:
    heard: list[float] = []
    histogram = observed()
    histogram.listener = heard.append
    histogram.observe(1.5, 3)
    assert (histogram.counts, histogram.sum, heard) == ([0, 3, 0], 4.5, [1.5, 1.5, 1.5])


def test_a_copy_counts_no_later_value_and_notifies_no_listener() -> None:
    heard: list[float] = []
    histogram = observed(0.5)
    histogram.listener = heard.append
    copy = histogram.copy()
    histogram.observe(1.5)
    assert (copy.counts, copy.sum, copy.listener) == ([1, 0, 0], 0.5, None)
    assert heard == [1.5]


def test_the_difference_to_a_copy_has_its_own_counts_and_sum() -> None:
    histogram = observed(0.5, 1.5)
    copy = histogram.copy()
    histogram.observe(2.5)
    since = histogram.since(copy)
    assert (since.counts, since.sum) == ([0, 0, 1], 2.5)


def test_differences_of_reasons_start_at_the_copy_and_new_reasons_at_zero() -> None:
    metrics = Metrics(finished={"stop": 2})
    copy = metrics.copy()
    metrics.finished["stop"] += 1
    metrics.finished["length"] = 4
    assert copy.finished == {"stop": 2}
    assert metrics.since(copy).finished == {"stop": 1, "length": 4}


def test_a_step_counts_every_accepted_position() -> None:
    metrics = Metrics(accepted=[0, 0, 0])
    for count in (2, 0, 3, 1):
        metrics.accept(count)
    assert (metrics.accepted, metrics.steps, metrics.accepted_per_step.sum) == ([3, 2, 1], 4, 6)


def test_time_of_a_round_outside_its_parts_is_idle_time() -> None:
    seconds = dict(zip(DEVICE_PHASES, (0.002, 0.004, 0.01, 0.001, 0.001, 0.02), strict=True))
    ms = Metrics(timed_rounds=2, device_seconds=seconds).device_ms_per_round
    assert ms == pytest.approx(
        {"prefill": 1.0, "propose": 2.0, "target": 5.0, "verify": 0.5, "draft_prompts": 0.5, "round": 10.0, "idle": 1.0}
    )
    assert Metrics().device_ms_per_round == {}

"""Metrics may be read by other threads while the loop counts."""

import sys
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tandemrt.runtime.metrics.histogram import Histogram
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.metrics.names import counters, vllm_counters
from tandemrt.runtime.servers.http.metrics import _MetricsCollector


@pytest.fixture
def eager_threads() -> Iterator[None]:
    """Make threads switch as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_threads")
def test_metrics_may_be_copied_while_the_loop_adds_new_reasons() -> None:
    metrics, copied = Metrics(finished={f"reason {i}": i for i in range(200)}), threading.Event()

    def count() -> None:
        while not copied.is_set():
            metrics.finished[f"new {len(metrics.finished)}"] = 1
            if len(metrics.finished) > 300:
                metrics.finished = {f"reason {i}": i for i in range(200)}

    thread = threading.Thread(target=count)
    thread.start()
    try:
        for _ in range(100):
            assert metrics.copy().finished["reason 7"] == 7
    finally:
        copied.set()
        thread.join()


def test_a_copy_does_not_change() -> None:
    metrics = Metrics(accepted=[1, 2])
    copy = metrics.copy()
    metrics.accepted[0] += 1
    metrics.seconds["wait"] += 1.0
    metrics.queue_seconds.observe(1.0)
    assert (copy.accepted, copy.seconds["wait"], copy.queue_seconds.count) == ([1, 2], 0.0, 0)
    assert metrics.since(copy).accepted == [1, 0]


def test_traffic_begins_where_it_is_told_to() -> None:
    metrics = Metrics(rounds=2, finished={"length": 1}, accepted=[1])
    metrics.queue_seconds.observe(1.0)
    assert (metrics.traffic.rounds, metrics.traffic.queue_seconds.count) == (2, 1)
    metrics.begin_traffic()
    metrics.rounds += 1
    metrics.finished["stop"] = 4
    metrics.queue_seconds.observe(2.0)
    traffic = metrics.traffic
    assert (traffic.rounds, traffic.finished, traffic.accepted) == (1, {"length": 0, "stop": 4}, [0])
    assert (traffic.queue_seconds.count, traffic.queue_seconds.sum) == (1, 2.0)
    assert metrics.rounds == 3


def test_a_value_on_a_bound_counts_below_it_as_prometheus_has_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    assert (histogram.counts, histogram.count, histogram.sum) == ([2, 2, 1], 5, 7.5)


def test_buckets_count_observations_since_a_copy() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(0.5)
    copy = histogram.copy()
    histogram.observe(1.5)
    since = histogram.since(copy)
    assert (since.counts, since.count, since.sum) == ([0, 1, 0], 1, 1.5)


def test_a_counter_by_vllms_name_has_the_value_of_ours() -> None:
    metrics = Metrics(kept=1, preemptions=2, steps=3, evaluated=4, accepted=[5, 6], finished={"stop": 7, "length": 8})
    metrics.prompt_tokens.observe(9)
    assert {(name, *(value for _, value in labels)): count for (name, labels), count in vllm_counters(metrics)} == {
        ("vllm:generation_tokens_total",): 1,
        ("vllm:num_preemptions_total",): 2,
        ("vllm:spec_decode_num_drafts_total",): 3,
        ("vllm:spec_decode_num_draft_tokens_total",): 4,
        ("vllm:spec_decode_num_accepted_tokens_total",): 11,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "0"): 5,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "1"): 6,
        ("vllm:request_success_total", "stop"): 7,
        ("vllm:request_success_total", "length"): 8,
        ("vllm:prompt_tokens_total",): 9,
    }


def test_counters_begin_at_zero() -> None:
    assert not any(value for _, value in [*counters(Metrics()), *vllm_counters(Metrics())])


def test_a_counter_at_metrics_never_falls_and_models_count_apart() -> None:
    llms = {
        name: SimpleNamespace(metrics=Metrics(kept=kept), kv_cache_usage=0.0) for name, kept in (("a", 5), ("b", 2))
    }
    collector = _MetricsCollector(cast("Any", llms))

    def kept() -> dict[str, float]:
        family = collector._counters()["vllm:generation_tokens_total"]
        return {sample.labels["model_name"]: sample.value for sample in family.samples}

    assert kept() == {"a": 5, "b": 2}
    llms["a"].metrics.kept, llms["b"].metrics.kept = 4, 3  # a stop string cut off text that was counted
    assert kept() == {"a": 5, "b": 3}
    llms["a"].metrics.kept = 6
    assert kept() == {"a": 6, "b": 3}

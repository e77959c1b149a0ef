"""Publish the runtime's metrics at Triton's ``/metrics``."""

import threading
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import Any

import triton_python_backend_utils as pb_utils

from tandemrt.runtime.metrics.histogram import Histogram
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.metrics.names import Key, counters, help_text, histograms
from tandemrt.runtime.workers.threads import start

_INTERVAL_S = 0.25


class MetricsPublisher:
    """A thread that adds what ``metrics`` counted to Triton's metrics, so that the engine loop pays nothing.

    Args:
        gauges: functions by metric name that return the current value.
        labels: labels of every metric.
    """

    def __init__(self, metrics: Metrics, gauges: Mapping[str, Callable[[], float]], labels: Mapping[str, str]) -> None:
        self._metrics = metrics
        self._labels = dict(labels)
        self._families: dict[str, Any] = {}
        self._counters: dict[Key, Any] = {}
        self._sent: dict[Key, float] = {}
        for key, _ in counters(metrics.traffic):
            self._counter(key)
        self._gauges = [(self._metric("GAUGE", f"tandemrt_{name}"), read) for name, read in gauges.items()]
        self._observed: SimpleQueue[tuple[Any, float]] = SimpleQueue()
        for name, histogram in histograms(metrics):
            self._listen(name, histogram)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tandemrt-metrics", daemon=True)
        start(self._thread, "metrics")

    def close(self) -> None:
        """Publish the last values, then remove the metrics."""
        self._stop.set()
        self._thread.join()
        for _, histogram in histograms(self._metrics):
            histogram.listener = None
        self._counters.clear()  # Triton requires that a metric is removed before its family
        self._gauges.clear()
        self._families.clear()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            self._publish()
        self._publish()

    def _publish(self) -> None:
        for key, value in counters(self._metrics.traffic):
            # `kept` falls when a stop string cuts off text that was held as a possible delimiter; counters must not.
            if value > self._sent.get(key, 0):
                self._counter(key).increment(value - self._sent.get(key, 0))
                self._sent[key] = value
        for gauge, read in self._gauges:
            gauge.set(read())
        try:
            while True:
                histogram, value = self._observed.get_nowait()
                histogram.observe(value)
        except Empty:
            pass

    def _listen(self, name: str, histogram: Histogram) -> None:
        metric, observed = self._metric("HISTOGRAM", name, buckets=list(histogram.buckets)), self._observed
        histogram.listener = lambda value: observed.put((metric, value))

    def _counter(self, key: Key) -> Any:
        if key not in self._counters:
            name, labels = key
            self._counters[key] = self._metric("COUNTER", name, dict(labels))
        return self._counters[key]

    def _metric(self, kind: str, name: str, labels: Mapping[str, str] | None = None, **arguments: Any) -> Any:
        if name not in self._families:
            self._families[name] = pb_utils.MetricFamily(name, help_text(name), getattr(pb_utils.MetricFamily, kind))
        return self._families[name].Metric(labels=self._labels | dict(labels or {}), **arguments)

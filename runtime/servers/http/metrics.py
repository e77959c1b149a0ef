"""Prometheus metrics of the served models. /metrics reads them on request, so the engine loop pays nothing.

Metrics with vLLM's names have its label of the model, ``model_name``; ours have ``model``.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.metrics.histogram import Histogram
from tandemrt.runtime.metrics.names import (
    Key,
    counters,
    help_text,
    histograms,
    vllm_counters,
    vllm_histograms,
)

_GAUGES: Mapping[str, Callable[[LLM], float]] = {
    "tandemrt_requests_waiting": lambda llm: llm.waiting,
    "tandemrt_requests_running": lambda llm: llm.running,
    "tandemrt_kv_cache_usage": lambda llm: llm.kv_cache_usage,
    "vllm:num_requests_waiting": lambda llm: llm.waiting,
    "vllm:num_requests_running": lambda llm: llm.running,
    "vllm:kv_cache_usage_perc": lambda llm: llm.kv_cache_usage,
}


def metrics_registry(llms: Mapping[str, LLM]) -> CollectorRegistry:
    """Return a registry with the metrics of every model, without process metrics."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_MetricsCollector(llms))
    return registry


class _MetricsCollector(Collector):
    def __init__(self, llms: Mapping[str, LLM]) -> None:
        self._llms = llms
        self._highest: dict[tuple[str, Key], float] = {}  # a Prometheus counter must not fall; ours may

    def collect(self) -> Iterator[Metric]:
        yield from self._counters().values()
        for name, read in _GAUGES.items():
            gauge = GaugeMetricFamily(name, help_text(name), labels=[_model_label(name)])
            for model, llm in self._llms.items():
                gauge.add_metric([model], read(llm))
            yield gauge
        yield from self._histograms().values()

    def _histograms(self) -> dict[str, HistogramMetricFamily]:
        families: dict[str, HistogramMetricFamily] = {}
        for model, llm in self._llms.items():
            metrics = llm.metrics.traffic
            for name, histogram in (*histograms(metrics), *vllm_histograms(metrics)):
                if name not in families:
                    families[name] = HistogramMetricFamily(name, help_text(name), labels=[_model_label(name)])
                families[name].add_metric([model], _cumulative(histogram), histogram.sum)
        return families

    def _counters(self) -> dict[str, CounterMetricFamily]:
        families: dict[str, CounterMetricFamily] = {}
        for model, llm in self._llms.items():
            metrics = llm.metrics.traffic
            for key, value in (*counters(metrics), *vllm_counters(metrics)):
                self._highest[model, key] = max(value, self._highest.get((model, key), 0))
                name, labels = key
                if name not in families:
                    names = [_model_label(name), *(label for label, _ in labels)]
                    families[name] = CounterMetricFamily(name, help_text(name), labels=names)
                families[name].add_metric([model, *(label for _, label in labels)], self._highest[model, key])
        return families


def _model_label(name: str) -> str:
    return "model_name" if name.startswith("vllm:") else "model"


def _cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """Return the cumulative count up to each bound."""
    bounds = [*map(str, histogram.buckets), "+Inf"]
    return list(zip(bounds, accumulate(list(histogram.counts)), strict=True))

"""What the runtimes count, as Prometheus reads it: looked up when somebody asks, so the rounds pay nothing."""

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tandemrt.runtime.histogram import Histogram
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.published import Key, about, counters, histograms

_GAUGES: Mapping[str, Callable[[LLM], int]] = {
    "tandemrt_requests_waiting": lambda llm: llm.waiting,
    "tandemrt_requests_running": lambda llm: llm.running,
}


def registry(llms: Mapping[str, LLM]) -> CollectorRegistry:
    """Return a registry that counts every model under the label ``model``, and nothing of the process."""
    found = CollectorRegistry(auto_describe=False)
    found.register(_Counts(llms))
    return found


class _Counts(Collector):
    def __init__(self, llms: Mapping[str, LLM]) -> None:
        self._llms = llms
        self._most: dict[tuple[str, Key], float] = {}  # a counter never falls

    def collect(self) -> Iterator[Metric]:
        yield from self._counters().values()
        for name, read in _GAUGES.items():
            gauge = GaugeMetricFamily(name, about(name), labels=["model"])
            for model, llm in self._llms.items():
                gauge.add_metric([model], read(llm))
            yield gauge
        found = [(name, model, each) for model, llm in self._llms.items() for name, each in histograms(llm.metrics)]
        for name in dict.fromkeys(name for name, _, _ in found):
            family = HistogramMetricFamily(name, about(name), labels=["model"])
            for _, model, histogram in (each for each in found if each[0] == name):
                family.add_metric([model], _buckets(histogram), histogram.sum)
            yield family

    def _counters(self) -> dict[str, CounterMetricFamily]:
        families: dict[str, CounterMetricFamily] = {}
        for model, llm in self._llms.items():
            for key, value in counters(llm.metrics):
                self._most[model, key] = max(value, self._most.get((model, key), 0))
                name, labels = key
                if name not in families:
                    names = ["model", *(label for label, _ in labels)]
                    families[name] = CounterMetricFamily(name, about(name), labels=names)
                families[name].add_metric([model, *(label for _, label in labels)], self._most[model, key])
        return families


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Counts up to each bound, as Prometheus has them."""
    bounds = [*map(str, histogram.buckets), "+Inf"]
    return list(zip(bounds, accumulate(list(histogram.counts)), strict=True))

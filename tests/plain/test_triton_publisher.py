"""Published metrics: counters never fall, and gauges are read for every scrape."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tandemrt.runtime.metrics.metrics import Metrics


class Counter:
    def __init__(self) -> None:
        self.value = 0.0

    def increment(self, by: float) -> None:
        if by < 0:
            raise ValueError("a counter is only incremented")
        self.value += by


def test_a_count_that_fell_is_published_once_it_exceeds_its_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a possible delimiter are held back, and a stop string that ends inside it may drop them."""
    counters: dict[str, Counter] = {}

    class MetricFamily:
        COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def Metric(self, **_: Any) -> Counter:  # noqa: N802  # the server's name
            return counters.setdefault(self.name, Counter())

    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace(MetricFamily=MetricFamily))
    monkeypatch.delitem(sys.modules, "tandemrt.runtime.servers.triton.metrics", raising=False)
    from tandemrt.runtime.servers.triton.metrics import MetricsPublisher

    metrics = Metrics()
    publisher = MetricsPublisher(metrics, {}, {})
    seen = []
    for kept in (5, 3, 4, 7):
        metrics.kept = kept
        publisher._publish()
        seen.append(counters["tandemrt_kept_total"].value)
    publisher.close()
    assert seen == [5, 5, 5, 7]


def test_a_gauge_is_read_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[str, list[float]] = {}

    class MetricFamily:
        COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def Metric(self, **_: Any) -> Any:  # noqa: N802  # the server's name
            return SimpleNamespace(set=shown.setdefault(self.name, []).append, increment=lambda by: by)

    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace(MetricFamily=MetricFamily))
    monkeypatch.delitem(sys.modules, "tandemrt.runtime.servers.triton.metrics", raising=False)
    from tandemrt.runtime.servers.triton.metrics import MetricsPublisher

    waiting = [3]
    publisher = MetricsPublisher(Metrics(), {"requests_waiting": lambda: waiting[0]}, {})
    publisher._publish()
    waiting[0] = 1
    publisher.close()
    assert shown["tandemrt_requests_waiting"][0] == 3
    assert shown["tandemrt_requests_waiting"][-1] == 1


def test_metrics_are_removed_before_their_families(monkeypatch: pytest.MonkeyPatch) -> None:
    removed: list[str] = []

    class Removable:
        def __init__(self, name: str) -> None:
            self.name = name

        def increment(self, by: float) -> None:
            pass

        set = observe = increment

        def __del__(self) -> None:
            removed.append(f"metric {self.name}")

    class MetricFamily:
        COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

        def __init__(self, name: str, *_: Any) -> None:
            self.name = name

        def Metric(self, **_: Any) -> Removable:  # noqa: N802  # the server's name
            return Removable(self.name)

        def __del__(self) -> None:
            removed.append(f"family {self.name}")

    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace(MetricFamily=MetricFamily))
    monkeypatch.delitem(sys.modules, "tandemrt.runtime.servers.triton.metrics", raising=False)
    from tandemrt.runtime.servers.triton.metrics import MetricsPublisher

    MetricsPublisher(Metrics(), {"requests_waiting": lambda: 0}, {}).close()
    kinds, names = zip(*(each.split() for each in removed), strict=True)
    families = kinds.index("family")
    assert set(kinds[:families]) == {"metric"}
    assert set(kinds[families:]) == {"family"}
    assert {"tandemrt_kept_total", "tandemrt_requests_waiting"} < set(names[:families]) == set(names[families:])

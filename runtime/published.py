"""How what the runtime counts is called where it is published: each field of ``Metrics`` by its type.

A number is a counter, a dict a counter with a label, a list a counter by position, a ``Histogram`` a histogram.
"""

from collections.abc import Iterator
from dataclasses import fields

from tandemrt.engines.errors import InternalError
from tandemrt.runtime.histogram import Histogram
from tandemrt.runtime.metrics import Metrics

# Of the fields that are dicts:
_LABELS = {"finished": "reason", "seconds": "verb", "eager_runs": "reason", "device_seconds": "piece"}

Key = tuple[str, tuple[tuple[str, str], ...]]  # a name and its labels


def counters(metrics: Metrics) -> Iterator[tuple[Key, float]]:
    """Every counter of ``metrics`` and where it stands. What stands may fall back; what is published must not."""
    for field in fields(metrics):
        name, value = f"tandemrt_{field.name}_total", getattr(metrics, field.name)
        if isinstance(value, int | float):
            yield (name, ()), value
        elif isinstance(value, dict) and field.name in _LABELS:
            yield from (((name, ((_LABELS[field.name], key),)), count) for key, count in list(value.items()))
        elif isinstance(value, list):
            yield from (((name, (("position", str(at)),)), count) for at, count in enumerate(value, start=1))
        elif not isinstance(value, Histogram):
            raise InternalError(f"Metrics.{field.name}: no way is known to publish a {type(value).__name__}")


def histograms(metrics: Metrics) -> Iterator[tuple[str, Histogram]]:
    """Every histogram of ``metrics`` by name."""
    values = ((f"tandemrt_{field.name}", getattr(metrics, field.name)) for field in fields(metrics))
    return ((name, value) for name, value in values if isinstance(value, Histogram))


def about(name: str) -> str:
    """Say what the metric of that name is."""
    return f"TandemRT's runtime: {name.removeprefix('tandemrt_').removesuffix('_total').replace('_', ' ')}"

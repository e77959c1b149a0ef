"""Prometheus names of the metrics, derived from the fields of ``Metrics``.

A number becomes a counter, a dict a counter with a label, a list a counter with the label ``position``, and a
``Histogram`` a histogram.
"""

from collections.abc import Iterator
from dataclasses import fields

from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.metrics.histogram import Histogram
from tandemrt.runtime.metrics.metrics import Metrics

# The label of each dict field:
_LABELS = {"finished": "reason", "seconds": "phase", "eager_runs": "reason", "device_seconds": "phase"}

Key = tuple[str, tuple[tuple[str, str], ...]]  # name, and pairs of label and value


def counters(metrics: Metrics) -> Iterator[tuple[Key, float]]:
    """Every counter of ``metrics`` with its value."""
    for field in fields(metrics):
        name, value = f"tandemrt_{field.name}_total", getattr(metrics, field.name)
        if isinstance(value, int | float):
            yield (name, ()), value
        elif isinstance(value, dict) and field.name in _LABELS:
            yield from (((name, ((_LABELS[field.name], key),)), count) for key, count in list(value.items()))
        elif isinstance(value, list):
            yield from (((name, (("position", str(at)),)), count) for at, count in enumerate(value, start=1))
        elif not isinstance(value, Histogram):
            raise InternalError(
                f"Metrics.{field.name}: must be a number, dict, list or Histogram, received a {type(value).__name__}"
            )


def speculation_counters(metrics: Metrics) -> Iterator[tuple[Key, float]]:
    """The counters of speculation under vLLM's names, with positions from 0: ``vllm bench serve`` reads them."""
    yield ("vllm:spec_decode_num_drafts_total", ()), metrics.steps
    yield ("vllm:spec_decode_num_draft_tokens_total", ()), metrics.evaluated
    yield ("vllm:spec_decode_num_accepted_tokens_total", ()), sum(metrics.accepted)
    for position, count in enumerate(metrics.accepted):
        yield ("vllm:spec_decode_num_accepted_tokens_per_pos_total", (("position", str(position)),)), count


def histograms(metrics: Metrics) -> Iterator[tuple[str, Histogram]]:
    """Every histogram of ``metrics`` by name."""
    values = ((f"tandemrt_{field.name}", getattr(metrics, field.name)) for field in fields(metrics))
    return ((name, value) for name, value in values if isinstance(value, Histogram))


def help_text(name: str) -> str:
    """The help text of metric ``name``."""
    words = name.removeprefix("tandemrt_").removeprefix("vllm:").removesuffix("_total")
    return f"TandemRT's runtime: {words.replace('_', ' ')}"

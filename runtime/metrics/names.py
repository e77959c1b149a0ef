"""Prometheus names of the metrics: ours, derived from the fields of ``Metrics``, and those of vLLM for the same values.

A number becomes a counter, a dict a counter with a label, a list a counter with the label ``position``, and a
``Histogram`` a histogram.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields

from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.metrics.histogram import Histogram
from tandemrt.runtime.metrics.metrics import Metrics

# The label of each dict field:
_LABELS = {"finished": "reason", "seconds": "phase", "eager_runs": "reason", "device_seconds": "phase"}

Value = float | Mapping[str, float] | list[int] | Histogram
Key = tuple[str, tuple[tuple[str, str], ...]]  # name, and pairs of label and value

VLLM: Mapping[str, Callable[[Metrics], Value]] = {
    "vllm:prompt_tokens_total": lambda metrics: metrics.prompt_tokens.sum,
    "vllm:generation_tokens_total": lambda metrics: metrics.kept,
    "vllm:request_success_total": lambda metrics: metrics.finished,
    "vllm:num_preemptions_total": lambda metrics: metrics.preemptions,
    "vllm:spec_decode_num_drafts_total": lambda metrics: metrics.steps,
    "vllm:spec_decode_num_draft_tokens_total": lambda metrics: metrics.evaluated,
    "vllm:spec_decode_num_accepted_tokens_total": lambda metrics: sum(metrics.accepted),
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": lambda metrics: metrics.accepted,
    "vllm:e2e_request_latency_seconds": lambda metrics: metrics.request_seconds,
    "vllm:request_queue_time_seconds": lambda metrics: metrics.queue_seconds,
    "vllm:request_prefill_time_seconds": lambda metrics: metrics.prefill_seconds,
    "vllm:request_decode_time_seconds": lambda metrics: metrics.decode_seconds,
    "vllm:time_to_first_token_seconds": lambda metrics: metrics.time_to_first_token_seconds,
    "vllm:inter_token_latency_seconds": lambda metrics: metrics.inter_token_seconds,
    "vllm:time_per_output_token_seconds": lambda metrics: metrics.inter_token_seconds,
    "vllm:request_prompt_tokens": lambda metrics: metrics.prompt_tokens,
    "vllm:request_generation_tokens": lambda metrics: metrics.output_tokens,
    "vllm:request_max_num_generation_tokens": lambda metrics: metrics.output_tokens,
}
"""The metrics that vLLM's Grafana dashboard and ``vllm bench serve`` read, by vLLM's name. They count nothing anew."""


def counters(metrics: Metrics) -> Iterator[tuple[Key, float]]:
    """Every counter of ``metrics`` with its value."""
    for field in fields(metrics):
        value = getattr(metrics, field.name)
        if not isinstance(value, Histogram):
            yield from _series(f"tandemrt_{field.name}_total", value, _LABELS.get(field.name))


def vllm_counters(metrics: Metrics) -> Iterator[tuple[Key, float]]:
    """Every counter of ``metrics`` that has a name in vLLM, whose positions begin at 0."""
    for name, read in VLLM.items():
        value = read(metrics)
        if not isinstance(value, Histogram):
            yield from _series(name, value, "finished_reason", first=0)


def histograms(metrics: Metrics) -> Iterator[tuple[str, Histogram]]:
    """Every histogram of ``metrics`` by name."""
    values = ((f"tandemrt_{field.name}", getattr(metrics, field.name)) for field in fields(metrics))
    return ((name, value) for name, value in values if isinstance(value, Histogram))


def vllm_histograms(metrics: Metrics) -> Iterator[tuple[str, Histogram]]:
    """Every histogram of ``metrics`` that has a name in vLLM."""
    values = ((name, read(metrics)) for name, read in VLLM.items())
    return ((name, value) for name, value in values if isinstance(value, Histogram))


def help_text(name: str) -> str:
    """The help text of metric ``name``."""
    words = name.removeprefix("tandemrt_").removeprefix("vllm:").removesuffix("_total")
    return f"TandemRT's runtime: {words.replace('_', ' ')}"


def _series(name: str, value: object, label: str | None, *, first: int = 1) -> Iterator[tuple[Key, float]]:
    if isinstance(value, int | float):
        yield (name, ()), value
    elif isinstance(value, dict) and label is not None:
        yield from (((name, ((label, key),)), count) for key, count in list(value.items()))
    elif isinstance(value, list):
        yield from (((name, (("position", str(at)),)), count) for at, count in enumerate(value, start=first))
    else:
        raise InternalError(f"{name}: must be a number, dict, list or Histogram, received a {type(value).__name__}")

"""Counters, times and latency histograms of the engine loop."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from tandemrt.runtime.metrics.histogram import Histogram

PHASES = ("prefill", "propose", "target", "wait", "commit", "deliver", "fill", "verify", "draft_prompts")
DEVICE_PHASES = ("prefill", "propose", "target", "verify", "draft_prompts", "round")
# Bucket bounds of the histograms:
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SHORT_SECONDS = (
    0.00001,
    0.000025,
    0.00005,
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    1.0,
)
_DRAFTS = tuple(range(17))  # a draft window has at most 16 tokens
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


@dataclass
class Metrics:
    """Counters and histograms of an engine loop since it started. Times are host seconds unless stated otherwise."""

    rounds: int = 0
    waits: int = 0  # times the host waited for the device
    drafted: int = 0  # tokens that drafters proposed for running requests
    evaluated: int = 0  # drafted tokens that the target verified
    constraint_rejected_drafts: int = 0  # drafted tokens that a constraint rejected, so that they were not verified
    fast_forward_drafts: int = 0  # verified tokens that a constraint drafted (fast-forward tokens)
    synthetic_drafts: int = 0  # verified tokens that synthetic acceptance accepted, regardless of the target
    emitted: int = 0  # output tokens of verification: accepted drafts and one more token per row
    kept: int = 0  # emitted tokens that became output; not those after a stop token or other end
    steps: int = 0  # verified draft windows: one per request and round with drafts (vLLM: num_drafts)
    accepted: list[int] = field(default_factory=list)  # accepted and kept drafted tokens, by draft position
    prefilled: int = 0  # prompt tokens processed before a request's first round
    cached: int = 0  # prompt tokens that prefix caching saved
    preemptions: int = 0  # times a request lost its slot because cache memory ran out, to resume later
    forced_ends: int = 0  # times a thinking budget ended the reasoning
    reasoning_ends_mid_round: int = 0  # times reasoning ended between tokens of one round
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    graphs_captured: int = 0  # CUDA graphs captured
    graph_replays: int = 0
    eager_runs: dict[str, int] = field(default_factory=dict)  # phases that ran without a graph, by reason
    timed_rounds: int = 0  # rounds in device_seconds; both are counted only with option `profile`
    device_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(DEVICE_PHASES, 0.0))
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))  # from submission to a slot
    time_to_first_token_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))  # from submission
    prefill_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))  # from a slot to the first token
    decode_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))  # from the first token to the end
    request_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))  # from submission to the end
    prompt_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))  # of each request that got a slot
    output_tokens: Histogram = field(default_factory=lambda: Histogram(_TOKENS))  # of each request that ended
    inter_token_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))  # one value per token
    # To fill the mask rows of one request, per round.
    fill_seconds: Histogram = field(default_factory=lambda: Histogram(_SHORT_SECONDS))
    accepted_per_step: Histogram = field(default_factory=lambda: Histogram(_DRAFTS))

    def __post_init__(self) -> None:
        self.listener: Callable[[str, float, float], None] | None = None
        """Called with phase, start and end of each ``timed`` block, in seconds of ``time.perf_counter``."""
        self._before: Metrics | None = None

    def timed(self, phase: str) -> "_Timed":
        """Add the host time of the block to ``seconds[phase]``."""
        return _Timed(self, phase)

    @property
    def acceptance_length(self) -> float:
        """Mean number of tokens per verified draft window, including the one that the target decides."""
        return 1 + sum(self.accepted) / max(1, self.steps)

    @property
    def acceptance_per_position(self) -> list[float]:
        """For each position of the draft window, the share of verified windows in which it was accepted."""
        return [count / max(1, self.steps) for count in self.accepted]

    @property
    def host_ms_per_round(self) -> dict[str, float]:
        """Mean host milliseconds per round, by phase of a round."""
        return {phase: 1e3 * self.seconds[phase] / max(1, self.rounds) for phase in PHASES if phase != "prefill"}

    @property
    def device_ms_per_round(self) -> dict[str, float]:
        """Mean device milliseconds per timed round: by phase, in total (``round``), and idle (``idle``).

        Empty without ``profile``.
        """
        if not self.timed_rounds:
            return {}
        ms = {phase: 1e3 * seconds / self.timed_rounds for phase, seconds in self.device_seconds.items()}
        return ms | {"idle": ms["round"] - sum(ms[phase] for phase in DEVICE_PHASES if phase != "round")}

    def accept(self, count: int, windows: int = 1) -> None:
        """Count verified draft windows with ``count`` tokens accepted and kept."""
        self.steps += windows
        for position in range(count):
            self.accepted[position] += windows
        self.accepted_per_step.observe(count, windows)

    def begin_traffic(self) -> None:
        """Count in ``traffic`` from now on: the warm-up has ended."""
        self._before = self.copy()

    @property
    def traffic(self) -> "Metrics":
        """A copy that servers publish: without what was counted before ``begin_traffic``."""
        return self.copy() if self._before is None else self.copy().since(self._before)

    def since(self, earlier: "Metrics") -> "Metrics":
        """The difference to ``earlier``, an earlier copy of these metrics."""
        return Metrics(**{f.name: _less(getattr(self, f.name), getattr(earlier, f.name)) for f in fields(self)})

    def copy(self) -> "Metrics":
        """A snapshot, without the listener."""
        return Metrics(**{f.name: _copied(getattr(self, f.name)) for f in fields(self)})


def _copied(value: Any) -> Any:
    # dict.copy is atomic, so the engine loop may add a key meanwhile.
    return value.copy() if isinstance(value, Histogram | dict | list) else value


def _less(now: Any, then: Any) -> Any:
    if isinstance(now, Histogram):
        return now.since(then)
    if isinstance(now, dict):
        return {key: now[key] - then.get(key, 0) for key in now}
    if isinstance(now, list):
        return [n - t for n, t in zip(now, then, strict=True)]
    return now - then


class _Timed:
    """A class, not a generator: a round enters seven such blocks, and a generator takes three times as long."""

    __slots__ = ("_metrics", "_phase", "_start")

    def __init__(self, metrics: Metrics, phase: str) -> None:
        self._metrics = metrics
        self._phase = phase

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_error: object) -> None:
        end = time.perf_counter()
        self._metrics.seconds[self._phase] += end - self._start
        if self._metrics.listener is not None:
            self._metrics.listener(self._phase, self._start, end)

"""What the runtime counts about itself, in one place."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from tandemrt.runtime.histogram import Histogram

VERBS = ("prefill", "propose", "target", "wait", "commit", "fill", "verify")
DEVICE = ("prefill", "propose", "target", "verify", "round")
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
QUICK = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
COUNTS = tuple(range(17))  # windows go up to 16


@dataclass
class Metrics:
    """Counters and histograms of a loop since it started. Times are host seconds."""

    rounds: int = 0
    waits: int = 0  # times the host waited for the device: one per round
    drafted: int = 0  # proposed tokens of live requests
    evaluated: int = 0  # of those, verified
    cut_drafts: int = 0  # of those, not verified: a constraint refused them
    forced_drafts: int = 0  # of those verified, drafted by a constraint because nothing else may follow
    synthetic_drafts: int = 0  # of those verified, accepted whatever the target said (rule synthetic)
    emitted: int = 0  # tokens that verification decided for live requests
    kept: int = 0  # of those, in a text
    steps: int = 0  # windows verified: a round counts once per request that drafted
    accepted: list[int] = field(default_factory=list)  # drafted tokens accepted and kept, by position in the window
    prefilled: int = 0  # tokens that went into the caches before a request's first round
    cached: int = 0  # tokens that need not, because they were found there
    preemptions: int = 0  # requests that gave their slot back for want of memory, and went on later
    forced_ends: int = 0  # reasoning closed by a budget
    boundaries_inside: int = 0  # reasoning that ended in the middle of what one round emitted
    finished: dict[str, int] = field(default_factory=dict)  # by finish reason
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(VERBS, 0.0))
    graphs_captured: int = 0  # pieces of a round that became CUDA graphs
    graph_replays: int = 0
    eager_runs: dict[str, int] = field(default_factory=dict)  # pieces that ran without a graph, by reason
    timed_rounds: int = 0  # with `profile`, and so are these: device seconds by piece, and of whole rounds
    device_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(DEVICE, 0.0))
    queue_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # from submission to a slot
    time_to_first_token_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # from submission
    inter_token_seconds: Histogram = field(default_factory=lambda: Histogram(SECONDS))  # one value per token
    fill_seconds: Histogram = field(default_factory=lambda: Histogram(QUICK))  # of a grammar's masks, per round
    accepted_per_step: Histogram = field(default_factory=lambda: Histogram(COUNTS))

    def __post_init__(self) -> None:
        self.listener: Callable[[str, float, float], None] | None = None
        """Hears the verb, the start and the end of all that is ``timed``, in seconds of ``time.perf_counter``."""

    @contextmanager
    def timed(self, verb: str) -> Iterator[None]:
        """Add the host time of the block to ``seconds[verb]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.seconds[verb] += end - start
            if self.listener is not None:
                self.listener(verb, start, end)

    @property
    def device_ms_per_round(self) -> dict[str, float]:
        """Milliseconds of a timed round: on each piece, in all (``round``), and with nothing to do (``idle``).

        Empty without ``profile``.
        """
        if not self.timed_rounds:
            return {}
        ms = {piece: 1e3 * seconds / self.timed_rounds for piece, seconds in self.device_seconds.items()}
        return ms | {"idle": ms["round"] - sum(ms[piece] for piece in DEVICE if piece != "round")}

    def accept(self, count: int) -> None:
        """Count one verified window, of which ``count`` drafted tokens were accepted and kept."""
        self.steps += 1
        for position in range(count):
            self.accepted[position] += 1
        self.accepted_per_step.observe(count)

    def since(self, earlier: "Metrics") -> "Metrics":
        """What was counted after ``earlier``, a copy of these metrics."""
        return Metrics(**{f.name: _less(getattr(self, f.name), getattr(earlier, f.name)) for f in fields(self)})

    def copy(self) -> "Metrics":
        """The metrics as they stand, with nobody listening."""
        return Metrics(**{f.name: _copied(getattr(self, f.name)) for f in fields(self)})


def _copied(value: Any) -> Any:
    # A dict copies itself in one step, also while the loop adds a key to it.
    return value.copy() if isinstance(value, Histogram | dict | list) else value


def _less(now: Any, then: Any) -> Any:
    if isinstance(now, Histogram):
        return now.since(then)
    if isinstance(now, dict):
        return {key: now[key] - then.get(key, 0) for key in now}
    if isinstance(now, list):
        return [n - t for n, t in zip(now, then, strict=True)]
    return now - then

"""Measure concurrent requests between two moments while all of them decode."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandemrt import LLM, SamplingParams
from tandemrt.runtime.metrics.metrics import Metrics
from tools.bench.gpu.submitted import SubmittedRequests

WARM = 32  # unmeasured tokens at the start of every request


@dataclass(frozen=True)
class Measured:
    """Figures between the two moments, in wall time. ``metrics`` covers this time only."""

    seconds: float
    tokens: int  # of all requests
    context: float  # mean cached tokens of a row
    metrics: Metrics
    finished: int  # requests that ended early, which makes the batch smaller
    forced_ends: int  # reasoning blocks that a budget ended

    @property
    def ms_per_round(self) -> float:
        return 1e3 * self.seconds / max(1, self.metrics.rounds)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.metrics.accepted) / max(1, self.metrics.steps)

    @property
    def device_ms(self) -> dict[str, float]:
        """Device milliseconds per round by phase, with ``round`` and ``idle``."""
        return self.metrics.device_ms_per_round

    def to_json(self) -> dict[str, Any]:
        rounds = max(1, self.metrics.rounds)
        return {
            "ms_per_round": self.ms_per_round,
            "device_ms": self.device_ms,
            "host_ms": {verb: 1e3 * seconds / rounds for verb, seconds in self.metrics.seconds.items()},
            "rounds": self.metrics.rounds,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "acceptance_length": self.acceptance_length,
            "accepted_at": [count / max(1, self.metrics.steps) for count in self.metrics.accepted],
            "context": self.context,
            "constraint_rejected_drafts": self.metrics.constraint_rejected_drafts,
            "forced_ends": self.forced_ends,
            "graph_replays": self.metrics.graph_replays,
            "eager_runs": {reason: count for reason, count in self.metrics.eager_runs.items() if count},
            "finished_early": self.finished,
        }


class Burst:
    """Sends all requests at once; measures from WARM tokens of each until ``measured`` further tokens on average.

    Both moments are taken in the thread of the engine loop, between rounds. Requests are cancelled at the end.
    """

    def __init__(self, llm: LLM, measured: int) -> None:
        self._llm = llm
        self._measured = measured
        self._start: tuple[float, Metrics, int] | None = None
        self._result: Measured | None = None
        self._prompt = 0  # tokens of a prompt, on average
        self.started = threading.Event()  # all requests are decoding

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], timeout_s: float = 120) -> Measured:
        """Return the measurement. Raises RuntimeError if requests fail, end too early or take too long."""
        self._prompt = sum(map(len, prompts)) // len(prompts)
        sent = SubmittedRequests(self._llm, prompts, params, self._look)
        try:
            sent.wait(lambda: self._result or sent.ended == len(prompts), timeout_s)
        finally:
            sent.cancel()
            sent.wait_at_most(lambda: sent.ended == len(prompts), timeout_s)
        if self._result is None:
            reason = "all requests ended before the measurement"
            raise RuntimeError(f"burst of {len(prompts)}: {reason}; tokens so far: {sent.counts}")
        return replace(self._result, forced_ends=sent.forced_ends)

    def _look(self, sent: SubmittedRequests) -> None:
        if self._result is not None:
            return
        if self._start is None:
            if min(sent.counts) >= WARM:
                self._start = (time.perf_counter(), self._llm.metrics.copy(), sent.tokens)
                self.started.set()
            return
        begin, metrics, before = self._start
        tokens = sent.tokens
        if tokens - before >= self._measured * len(sent.counts):
            seconds = time.perf_counter() - begin
            context = self._prompt + (before + tokens) / 2 / len(sent.counts)
            since = self._llm.metrics.since(metrics)
            self._result = Measured(seconds, tokens - before, context, since, sent.finished, 0)

"""Measure concurrent requests between two moments while all of them decode."""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandemrt import LLM, SamplingParams
from tandemrt.runtime.metrics.metrics import Metrics
from tandemrt.runtime.requests.request import Request, StreamOutput

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
        self._counts: list[int] = []
        self._tokens = 0  # of all requests
        self._cold = 0  # requests below WARM tokens
        self._start: tuple[float, Metrics, int] | None = None
        self._result: Measured | None = None
        self._left = 0
        self._finished = 0
        self._forced = 0
        self._prompt = 0
        self._ended = threading.Condition()
        self.started = threading.Event()  # all requests are decoding
        self._error: str | None = None

    def run(self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], timeout_s: float = 120) -> Measured:
        """Return the measurement. Raises RuntimeError if requests fail, end too early or take too long."""
        self._counts = [0] * len(prompts)
        self._cold = len(prompts)
        self._left = len(prompts)
        self._prompt = sum(map(len, prompts)) // len(prompts)
        requests: list[Request] = []
        try:
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
                requests.append(self._llm.submit(prompt, each, self._listener(index)))
            with self._ended:
                done = self._ended.wait_for(lambda: self._result or self._error or not self._left, timeout_s)
        finally:
            for request in requests:
                self._llm.cancel(request)
            with self._ended:
                self._ended.wait_for(lambda: not self._left, timeout_s)
        if self._result is None:
            reason = self._error or (
                "all requests ended before the measurement" if done else f"no end within {timeout_s} s"
            )
            raise RuntimeError(f"burst of {len(prompts)}: {reason}; tokens so far: {self._counts}")
        return replace(self._result, forced_ends=self._forced)

    def _listener(self, index: int) -> Any:
        def listen(item: StreamOutput) -> None:
            before, new = self._counts[index], len(item.token_ids)
            self._counts[index] += new
            self._tokens += new
            self._cold -= before < WARM <= before + new
            if item.output is not None:
                with self._ended:
                    self._left -= 1
                    self._finished += item.output.finish_reason != "cancelled"
                    self._forced += item.output.forced_ends
                    if item.output.finish_reason == "error":
                        self._error = item.output.error
                    self._ended.notify_all()
            self._look()

        return listen

    def _look(self) -> None:
        if self._result is not None:
            return
        tokens = self._tokens
        if self._start is None:
            if not self._cold:
                metrics = self._llm.metrics.copy()
                self._start = (time.perf_counter(), metrics, tokens)
                self.started.set()
            return
        begin, metrics, before = self._start
        if tokens - before < self._measured * len(self._counts):
            return
        seconds = time.perf_counter() - begin
        context = self._prompt + (before + tokens) / 2 / len(self._counts)
        since = self._llm.metrics.since(metrics)
        with self._ended:
            self._result = Measured(seconds, tokens - before, context, since, self._finished, 0)
            self._ended.notify_all()

"""Measure prompts: times of first tokens, and gaps of decoding requests while prompts arrive."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import quantiles
from typing import Any

from tandemrt import LLM, SamplingParams
from tandemrt.runtime.requests.request import Request, StreamOutput

_ROUND_S = 0.05  # the round that was enqueued before earlier requests ended has ended after it


@dataclass
class TokenTimes:
    """Arrival times of tokens per request, in seconds of time.perf_counter. ``tokens``: total number of tokens."""

    at: list[list[float]] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


class SubmittedRequests:
    """Requests submitted one after another, and the arrival times of their tokens."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        self._llm = llm
        self.timed = TokenTimes([[] for _ in prompts])
        self._left = self._silent = len(prompts)
        self._changed = threading.Condition()
        self.begin = time.perf_counter()
        self._requests: list[Request] = [
            llm.submit(prompt, each, partial(self._listen, self.timed.at[index]))
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]

    def first_tokens(self, timeout_s: float = 60) -> float:
        """Wait until every request has a token; return seconds since the first submission.

        Raises RuntimeError if a request fails or takes too long.
        """
        self._wait(lambda: not self._silent, timeout_s)
        return max(times[0] for times in self.timed.at) - self.begin

    def wait_for_tokens(self, tokens: int, seconds: float) -> None:
        """Wait until all requests together have ``tokens`` tokens, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self.timed.error or self.timed.tokens >= tokens, seconds)

    @property
    def ended(self) -> int:
        """Number of requests that have ended."""
        return len(self._requests) - self._left

    def end(self, timeout_s: float = 60) -> None:
        """Cancel running requests and wait for their end. Raises as ``first_tokens`` does."""
        for request in self._requests:
            self._llm.cancel(request)
        self._wait(lambda: not self._left, timeout_s)

    def finish(self, timeout_s: float = 60) -> None:
        """Wait for the end of all requests. Raises as ``first_tokens`` does."""
        self._wait(lambda: not self._left, timeout_s)

    def _wait(self, holds: Callable[[], bool], timeout_s: float) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self.timed.error or holds(), timeout_s)
        if self.timed.error or not done:
            raise RuntimeError(f"{len(self._requests)} prompts: {self.timed.error or f'no end within {timeout_s} s'}")

    def _listen(self, times: list[float], item: StreamOutput) -> None:
        now = time.perf_counter()
        if not item.token_ids and item.output is None:
            return
        with self._changed:
            if item.token_ids:
                self._silent -= not times
                times.append(now)
                self.timed.tokens += len(item.token_ids)
            if item.output is not None:
                self._left -= 1
                if item.output.finish_reason == "error":
                    self.timed.error = item.output.error
            self._changed.notify_all()


def first_tokens(llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> float:
    """Milliseconds until all of ``prompts``, sent at once to an idle device, have their first token."""
    time.sleep(_ROUND_S)
    sent = SubmittedRequests(llm, prompts, params)
    milliseconds = 1e3 * sent.first_tokens()
    sent.end()
    return milliseconds


def arrivals(
    llm: LLM,
    running: tuple[Sequence[list[int]], Sequence[SamplingParams]],
    coming: tuple[Sequence[list[int]], Sequence[SamplingParams]],
    alike: tuple[Sequence[list[int]], Sequence[SamplingParams]],
    *,
    seconds: float,
) -> dict[str, Any]:
    """Measure ``running`` requests while ``coming`` requests of one output token each arrive at once.

    The gaps are those between parts of the text of a running request. ``work`` compares the time until the last arrival
    has its token with the sum of both parts alone: ``running`` for ``seconds`` or half of its tokens, whichever comes
    first, and ``alike``, other prompts of the same length as ``coming``, because cached prefixes would distort the
    result. Raises RuntimeError if a running request ends before the last arrival has its token.
    """
    alone = first_tokens(llm, *alike) / 1e3
    sent = SubmittedRequests(llm, *running)
    sent.first_tokens()
    begin, before = time.perf_counter(), sent.timed.tokens
    sent.wait_for_tokens(sum(each.max_tokens or 0 for each in running[1]) // 2, seconds)
    rate = (sent.timed.tokens - before) / (time.perf_counter() - begin)
    start, tokens = time.perf_counter(), sent.timed.tokens
    came = SubmittedRequests(llm, *coming)
    took = came.first_tokens()
    decoded = sent.timed.tokens - tokens
    came.finish()
    if sent.ended:
        raise RuntimeError(f"arrivals: {sent.ended} requests ended while others arrived; raise --length")
    sent.end()
    gaps = [
        1e3 * (later - earlier)
        for times in sent.timed.at
        for earlier, later in pairwise(times)
        if later > start and earlier < start + took
    ]
    return {
        "first_tokens_ms": 1e3 * took,
        "first_tokens_alone_ms": 1e3 * alone,
        "gap_p50_ms": quantiles(gaps, n=100)[49],
        "gap_p99_ms": quantiles(gaps, n=100)[98],
        "gap_worst_ms": max(gaps),
        "tokens_per_second_alone": rate,
        "tokens_decoded": decoded,
        "work": (decoded / rate + alone) / took,
    }

"""What prompts cost: first tokens of many, beginnings that are known, and what arrivals do to those who decode."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from statistics import quantiles
from typing import Any

from tandemrt import LLM, SamplingParams
from tandemrt.runtime.requests.outputs import StreamOutput
from tandemrt.runtime.requests.request import Request


@dataclass
class Timed:
    """When the tokens of requests came, in seconds of time.perf_counter; ``tokens`` of all of them."""

    at: list[list[float]] = field(default_factory=list)
    tokens: int = 0
    error: str | None = None


class Sent:
    """Requests that were sent one behind the other, and when their tokens came."""

    def __init__(self, llm: LLM, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
        self._llm = llm
        self.timed = Timed([[] for _ in prompts])
        self._left = self._silent = len(prompts)
        self._changed = threading.Condition()
        self.begin = time.perf_counter()
        self._requests: list[Request] = [
            llm.submit(prompt, each, partial(self._listen, self.timed.at[index]))
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True))
        ]

    def first_tokens(self, timeout_s: float = 60) -> float:
        """Wait until every request has a token; seconds from the first submission to then.

        Raises RuntimeError if one fails, or if it takes too long.
        """
        self._wait(lambda: not self._silent, timeout_s)
        return max(times[0] for times in self.timed.at) - self.begin

    @property
    def ended(self) -> int:
        """Requests that are over."""
        return len(self._requests) - self._left

    def end(self, timeout_s: float = 60) -> None:
        """Cancel what still runs and wait for its end. Raises as ``first_tokens`` does."""
        for request in self._requests:
            self._llm.cancel(request)
        self._wait(lambda: not self._left, timeout_s)

    def finish(self, timeout_s: float = 60) -> None:
        """Wait for the end of all. Raises as ``first_tokens`` does."""
        self._wait(lambda: not self._left, timeout_s)

    def _wait(self, holds: Callable[[], bool], timeout_s: float) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self.timed.error or holds(), timeout_s)
        if self.timed.error or not done:
            raise RuntimeError(f"{len(self._requests)} prompts: {self.timed.error or f'not over in {timeout_s} s'}")

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
    """Milliseconds until all of ``prompts``, sent at once, have their first token."""
    sent = Sent(llm, prompts, params)
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
    """What it does to ``running`` requests when others come all at once, which ask for one token each.

    The gaps are those between the pieces of text of each running request. ``work`` is what was done until the last of
    those who came had its token, in the time that both parts take alone: running for ``seconds``, and coming, which
    is measured on ``alike``, other prompts as long, because none may be found in the caches.
    """
    alone = first_tokens(llm, *alike) / 1e3
    sent = Sent(llm, *running)
    sent.first_tokens()
    begin, before = time.perf_counter(), sent.timed.tokens
    time.sleep(seconds)
    rate = (sent.timed.tokens - before) / (time.perf_counter() - begin)
    start, tokens = time.perf_counter(), sent.timed.tokens
    came = Sent(llm, *coming)
    took = came.first_tokens()
    decoded = sent.timed.tokens - tokens
    came.finish()
    if sent.ended:
        raise RuntimeError(f"arrivals: {sent.ended} requests ended while others came; give them a larger length")
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

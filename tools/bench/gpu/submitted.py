"""Requests submitted one after another, and when their tokens arrive."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from tandemrt import LLM, SamplingParams
from tandemrt.runtime.requests.request import Request, StreamOutput

_POLL_S = 0.05


class SubmittedRequests:
    """Submits requests. ``look`` is called in the thread of the engine loop, between rounds, after each output.

    That thread does little here, because the time of rounds is measured.

    Attributes:
        begin: when the first one was submitted, in seconds of time.perf_counter.
        at: arrival times of tokens per request, likewise.
        counts: tokens per request.
        tokens: tokens of all requests.
        ended: requests that have ended.
        finished: of these, requests that were not cancelled.
        forced_ends: reasoning blocks that a budget ended.
    """

    def __init__(
        self,
        llm: LLM,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        look: Callable[["SubmittedRequests"], object] = lambda _: None,
    ) -> None:
        self.at: list[list[float]] = [[] for _ in prompts]
        self.counts = [0] * len(prompts)
        self.tokens = self.ended = self.finished = self.forced_ends = 0
        self._llm, self._look = llm, look
        self._error: str | None = None
        self._changed = threading.Condition()
        self._requests: list[Request] = []
        self.begin = time.perf_counter()
        try:
            for index, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
                self._requests.append(llm.submit(prompt, each, partial(self._listen, index)))
        except BaseException:
            self.cancel()
            raise

    def first_tokens(self, timeout_s: float = 60) -> float:
        """Wait until every request has a token; return seconds since the first submission.

        Raises RuntimeError if a request fails or takes too long.
        """
        self.wait(lambda: all(self.counts), timeout_s)
        return max(times[0] for times in self.at) - self.begin

    def wait(self, holds: Callable[[], object], timeout_s: float) -> None:
        """Wait until ``holds``. Raises as ``first_tokens`` does."""
        if not self.wait_at_most(holds, timeout_s) or self._error:
            reason = self._error or f"no end within {timeout_s} s"
            raise RuntimeError(f"{len(self._requests)} requests: {reason}; tokens so far: {self.counts}")

    def wait_at_most(self, holds: Callable[[], object], timeout_s: float) -> bool:
        """Wait until ``holds`` or a request has failed, at most ``timeout_s``; return whether it did.

        It is asked every _POLL_S, and when a request gets its first token or ends.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            while not (self._error or holds()) and time.monotonic() < end:
                self._changed.wait(_POLL_S)
            return bool(self._error or holds())

    def finish(self, timeout_s: float = 60) -> None:
        """Wait for the end of all requests. Raises as ``first_tokens`` does."""
        self.wait(lambda: self.ended == len(self._requests), timeout_s)

    def end(self, timeout_s: float = 60) -> None:
        """Cancel running requests and wait for their end. Raises as ``first_tokens`` does."""
        self.cancel()
        self.finish(timeout_s)

    def cancel(self) -> None:
        """Cancel running requests."""
        for request in self._requests:
            self._llm.cancel(request)

    def _listen(self, index: int, item: StreamOutput) -> None:
        now = time.perf_counter()
        if not item.token_ids and item.output is None:
            return
        first = not self.counts[index]
        if item.token_ids:
            self.at[index].append(now)
            self.counts[index] += len(item.token_ids)
            self.tokens += len(item.token_ids)
        if item.output is not None:
            self.ended += 1
            self.finished += item.output.finish_reason != "cancelled"
            self.forced_ends += item.output.forced_ends
            if item.output.finish_reason == "error":
                self._error = item.output.error
        self._look(self)
        if first or item.output is not None:
            with self._changed:
                self._changed.notify_all()

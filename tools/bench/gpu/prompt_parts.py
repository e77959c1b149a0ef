"""Parts of the report about prompts, measured on an opened bundle."""

from collections.abc import Sequence
from functools import partial
from itertools import count, product
from statistics import median
from typing import Any

from rich.console import Console

from tandemrt import LLM, SamplingParams
from tandemrt.engines.bundle.bundle import Bundle
from tools.bench.gpu import requests
from tools.bench.gpu.prompts import arrivals, first_tokens
from tools.bench.gpu.trace import traced

_REPEATS = 3
_SECONDS = 1.0  # of decoding alone, before other prompts arrive


class PromptParts:
    """Measures prompts of ``tokens`` tokens. All prompts differ, so no prefix is cached unless a part shares one."""

    def __init__(
        self, console: Console, llm: LLM, bundle: Bundle, *, tokens: int, temperature: float, window: int
    ) -> None:
        self._console = console
        self._llm = llm
        self._bundle = bundle
        self._tokens = tokens
        self._temperature = temperature
        self._window = window
        self._seeds = count(1)

    def first_tokens(self, wanted: Sequence[int]) -> dict[str, Any]:
        """Measure milliseconds until all of N prompts have their first token, with and without drafts, and the rate.

        Requests end with that token, as in the peers' measurements, or those that have theirs decode meanwhile.
        """
        times: dict[str, Any] = {}
        for ending, window in product((True, False), dict.fromkeys((0, self._window))):
            asked = partial(self._requests, window=window, ending=ending)
            name = f"window {window}, {'one token each' if ending else 'decoding goes on'}"
            first_tokens(self._llm, *asked(max(wanted)))  # binds the calls
            for requests_at_once in wanted:
                each = [first_tokens(self._llm, *asked(requests_at_once)) for _ in range(_REPEATS)]
                times[f"{requests_at_once} x {name}"] = each
                rate = 1e3 * requests_at_once * self._tokens / median(each)
                self._say(f"{requests_at_once} prompts, {name}: {_ms(each)}, {rate:,.0f} prompt tokens/s")
        return times

    def shared(self, wanted: Sequence[int], known: int) -> dict[str, Any]:
        """Measure the same for prompts that share their first ``known`` tokens, which are cached."""
        times: dict[str, Any] = {}
        for requests_at_once in wanted:
            each, before = [], self._llm.metrics.cached
            for _ in range(_REPEATS):
                prompts, params = self._requests(requests_at_once + 1, self._window)
                prompts = [prompts[0][:known] + prompt[known:] for prompt in prompts]
                first_tokens(self._llm, prompts[:1], params[:1])
                each.append(first_tokens(self._llm, prompts[1:], params[1:]))
            reused = (self._llm.metrics.cached - before) / (_REPEATS * requests_at_once)
            times[str(requests_at_once)] = {"first_tokens_ms": each, "reused": reused}
            self._say(
                f"{requests_at_once} prompts, {known} of {self._tokens} tokens shared, {reused:.0f} cached: "
                + _ms(each)
            )
        return times

    def arrivals(self, running: int, window: int, chunk: int | None) -> dict[str, Any]:
        """Measure the latency of ``running`` requests while as many prompts arrive at once.

        ``chunk``: prompt tokens per round while requests decode; None for the option of the bundle.
        """
        prompts = self._llm.loop.planner
        before, prompts.chunk_while_decoding = prompts.chunk_while_decoding, chunk or prompts.chunk_while_decoding
        try:
            return self._arrivals(running, window)
        finally:
            prompts.chunk_while_decoding = before

    def _arrivals(self, running: int, window: int) -> dict[str, Any]:
        decoding = self._requests(running, window)
        first_tokens(self._llm, *self._requests(2 * running, window))  # binds the calls
        coming, alike = (self._requests(running, window, ending=True) for _ in range(2))
        times = arrivals(self._llm, decoding, coming, alike, seconds=_SECONDS)
        self._say(
            f"{running} prompts arrive while {running} requests decode, window {window}: gaps p50 "
            f"{times['gap_p50_ms']:.1f}, p99 {times['gap_p99_ms']:.1f}, worst {times['gap_worst_ms']:.1f} ms; first "
            f"tokens of all after {times['first_tokens_ms']:.1f} ms, alone {times['first_tokens_alone_ms']:.1f}; "
            f"{100 * times['work']:.1f} % of the work of both parts alone"
        )
        return times

    def busy(self, requests_at_once: int) -> dict[str, Any]:
        """Measure the share of time that the GPU works, from the first to the last prompt token."""
        asked = self._requests(requests_at_once, 0, ending=True)

        def work() -> int:
            before = self._llm.metrics.rounds
            first_tokens(self._llm, *asked)
            return self._llm.metrics.rounds - before

        trace = traced(work)
        self._say(f"{requests_at_once} prompts: the GPU works {100 * (1 - trace['idle_share']):.1f} % of the time")
        for kernel in trace["kernels"]:
            self._say(f"  {kernel['us_each']:9.1f} us each  {kernel['name']}")
        return trace

    def long(self) -> dict[str, Any]:
        """Measure one prompt of ``tokens`` tokens."""
        each = [first_tokens(self._llm, *self._requests(1, 0)) for _ in range(_REPEATS)]
        rate = 1e3 * self._tokens / median(each)
        self._say(f"1 prompt of {self._tokens} tokens: {_ms(each)}, {rate:,.0f} prompt tokens/s")
        return {"first_tokens_ms": each}

    def _requests(
        self, many: int, window: int, *, ending: bool = False
    ) -> tuple[list[list[int]], list[SamplingParams]]:
        """Return new prompts and their parameters. ``ending``: one output token each, instead of as many as fit."""
        prompts = requests.prompts(self._bundle, many, self._tokens, next(self._seeds))
        params = requests.unconstrained(self._bundle, many, self._tokens, self._temperature, window)
        return prompts, [each.model_copy(update={"max_tokens": 1}) for each in params] if ending else params

    def _say(self, line: str) -> None:
        self._console.print(f"  {line}", markup=False)


def _ms(each: Sequence[float]) -> str:
    return f"{median(each):.1f} ms (runs: {', '.join(f'{one:.1f}' for one in each)})"

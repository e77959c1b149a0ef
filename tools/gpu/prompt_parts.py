"""The parts of the report about prompts, on an opened bundle."""

from collections.abc import Sequence
from itertools import count
from statistics import median
from typing import Any

from rich.console import Console

from tandemrt import LLM, SamplingParams
from tandemrt.engines.bundle import Bundle
from tools.gpu import requests
from tools.gpu.prompts import arrivals, first_tokens
from tools.gpu.trace import traced

_REPEATS = 3
_SECONDS = 1.0  # of decoding alone, before others come


class PromptParts:
    """Every prompt of ``tokens`` tokens is another one, so that nothing of it is known, unless a part says so."""

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
        """Milliseconds until all of so many prompts have their first token, without and with drafts; and the rate."""
        found: dict[str, Any] = {}
        first_tokens(self._llm, *self._asked(max(wanted), 0))  # binds the calls
        for requests_at_once in wanted:
            for window in dict.fromkeys((0, self._window)):
                each = [first_tokens(self._llm, *self._asked(requests_at_once, window)) for _ in range(_REPEATS)]
                found[f"{requests_at_once} x window {window}"] = each
                rate = 1e3 * requests_at_once * self._tokens / median(each)
                self._say(f"{requests_at_once} prompts, window {window}: {_ms(each)}, {rate:,.0f} prompt tokens/s")
        return found

    def shared(self, wanted: Sequence[int], known: int) -> dict[str, Any]:
        """The same for prompts that share their first ``known`` tokens, once one of them was read."""
        found: dict[str, Any] = {}
        for requests_at_once in wanted:
            each, before = [], self._llm.metrics.cached
            for _ in range(_REPEATS):
                prompts, params = self._asked(requests_at_once + 1, self._window)
                prompts = [prompts[0][:known] + prompt[known:] for prompt in prompts]
                first_tokens(self._llm, prompts[:1], params[:1])
                each.append(first_tokens(self._llm, prompts[1:], params[1:]))
            reused = (self._llm.metrics.cached - before) / (_REPEATS * requests_at_once)
            found[str(requests_at_once)] = {"first_tokens_ms": each, "reused": reused}
            self._say(
                f"{requests_at_once} prompts, {known} of {self._tokens} tokens shared, {reused:.0f} found again: "
                + _ms(each)
            )
        return found

    def arrivals(self, running: int, window: int, beside: int | None) -> dict[str, Any]:
        """What ``running`` requests feel when as many prompts come at once.

        ``beside``: prompt tokens of a round with requests that decode; None: as the bundle was opened.
        """
        prompts = self._llm.loop.prompts
        before, prompts.chunk_beside = prompts.chunk_beside, beside or prompts.chunk_beside
        try:
            return self._arrivals(running, window)
        finally:
            prompts.chunk_beside = before

    def _arrivals(self, running: int, window: int) -> dict[str, Any]:
        decoding = self._asked(running, window)
        first_tokens(self._llm, *self._asked(2 * running, window))  # binds the calls
        coming, alike = (self._asked(running, window, ending=True) for _ in range(2))
        found = arrivals(self._llm, decoding, coming, alike, seconds=_SECONDS)
        self._say(
            f"{running} prompts come beside {running} that decode, window {window}: gaps p50 "
            f"{found['gap_p50_ms']:.1f}, p99 {found['gap_p99_ms']:.1f}, worst {found['gap_worst_ms']:.1f} ms; first "
            f"tokens of all after {found['first_tokens_ms']:.1f} ms, alone {found['first_tokens_alone_ms']:.1f}; "
            f"{100 * found['work']:.1f} % of the work of both parts alone"
        )
        return found

    def busy(self, requests_at_once: int) -> dict[str, Any]:
        """The GPU's own records from the first to the last prompt token."""
        asked = self._asked(requests_at_once, 0, ending=True)

        def work() -> int:
            before = self._llm.metrics.rounds
            first_tokens(self._llm, *asked)
            return self._llm.metrics.rounds - before

        found = traced(work)
        self._say(f"{requests_at_once} prompts: the GPU works {100 * (1 - found['idle_share']):.1f} % of the time")
        for kernel in found["kernels"]:
            self._say(f"  {kernel['us_each']:9.1f} us each  {kernel['name']}")
        return found

    def long(self) -> dict[str, Any]:
        """One prompt of ``tokens`` tokens."""
        each = [first_tokens(self._llm, *self._asked(1, 0)) for _ in range(_REPEATS)]
        rate = 1e3 * self._tokens / median(each)
        self._say(f"1 prompt of {self._tokens} tokens: {_ms(each)}, {rate:,.0f} prompt tokens/s")
        return {"first_tokens_ms": each}

    def _asked(self, many: int, window: int, *, ending: bool = False) -> tuple[list[list[int]], list[SamplingParams]]:
        """New prompts and what is asked of them; ``ending``: one token each, else as many as fit."""
        prompts = requests.prompts(self._bundle, many, self._tokens, next(self._seeds))
        params = requests.plain(self._bundle, many, self._tokens, self._temperature, window)
        return prompts, [each.model_copy(update={"max_tokens": 1}) for each in params] if ending else params

    def _say(self, line: str) -> None:
        self._console.print(f"  {line}", markup=False)


def numbers(text: str) -> list[int]:
    """Read "1,16,64"; nothing is none."""
    return [int(each) for each in text.split(",") if each]


def _ms(each: Sequence[float]) -> str:
    return f"{median(each):.1f} ms (runs: {', '.join(f'{one:.1f}' for one in each)})"

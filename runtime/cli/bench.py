"""Measure a bundle: the same requests with and without speculation, in turns, so that a noisy machine hits both."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandemrt.engines.params import SamplingParams
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.metrics import VERBS, Metrics
from tandemrt.runtime.requests.outputs import RequestOutput
from tandemrt.runtime.requests.prompt import Prompt

ROUND = tuple(verb for verb in VERBS if verb != "prefill")  # what every round does


@dataclass(frozen=True)
class Measure:
    """One way of running the requests, over all repeats."""

    seconds: list[float]  # per repeat
    tokens: int  # per repeat
    metrics: Metrics  # over all repeats
    outputs: list[RequestOutput]  # of the last repeat

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    @property
    def ms_per_round(self) -> dict[str, float]:
        """Host milliseconds of a round, by verb."""
        return {verb: 1e3 * self.metrics.seconds[verb] / max(1, self.metrics.rounds) for verb in ROUND}

    @property
    def acceptance_length(self) -> float:
        """Tokens kept per request and round."""
        return 1 + sum(self.metrics.accepted) / max(1, self.metrics.steps)

    @property
    def acceptance_per_position(self) -> list[float]:
        """For each drafted position, the share of windows in which it was accepted."""
        return [count / max(1, self.metrics.steps) for count in self.metrics.accepted]

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "rounds": self.metrics.rounds,
            "waits": self.metrics.waits,
            "acceptance_length": self.acceptance_length,
            "acceptance_per_position": self.acceptance_per_position,
            "ms_per_round": self.ms_per_round,
        }


@dataclass(frozen=True)
class Comparison:
    """Plain decoding against speculation on the same requests."""

    plain: Measure
    speculated: Measure
    same_text: int  # requests whose tokens are equal in both

    @property
    def speedup(self) -> float:
        """Median over the repeats of plain time / speculated time, each pair run one after the other."""
        pairs = zip(self.plain.seconds, self.speculated.seconds, strict=True)
        return statistics.median(plain / speculated for plain, speculated in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "plain": self.plain.to_json(),
            "speculated": self.speculated.to_json(),
            "speedup": self.speedup,
            "requests": len(self.plain.outputs),
            "same_text": self.same_text,
        }


class Opener(Protocol):
    """Opens the bundle, with speculation or without."""

    def __call__(self, *, speculating: bool) -> LLM: ...


def compare(
    open_llm: Opener,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    *,
    repeats: int,
    on_repeat: Callable[[], None] = lambda: None,
) -> Comparison:
    """Run ``prompts`` ``repeats`` times each way, after one warm-up. ``open_llm`` opens the bundle."""
    with open_llm(speculating=False) as plain, open_llm(speculating=True) as speculated:
        llms = (plain, speculated)
        for llm in llms:
            llm.generate(list(prompts), list(params))
        on_repeat()
        starts = [llm.metrics.copy() for llm in llms]
        seconds: tuple[list[float], list[float]] = ([], [])
        outputs: list[list[RequestOutput]] = [[], []]
        for _ in range(repeats):
            for which, llm in enumerate(llms):
                start = time.perf_counter()
                outputs[which] = llm.generate(list(prompts), list(params))
                seconds[which].append(time.perf_counter() - start)
            on_repeat()
        measures = [
            Measure(seconds[i], sum(len(o.token_ids) for o in outputs[i]), llms[i].metrics.since(starts[i]), outputs[i])
            for i in range(2)
        ]
    same = sum(a.token_ids == b.token_ids for a, b in zip(*outputs, strict=True))
    return Comparison(measures[0], measures[1], same)

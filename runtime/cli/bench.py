"""Measure the same requests with and without speculation, alternately, so that machine noise affects both."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.metrics.metrics import PHASES, Metrics
from tandemrt.runtime.requests.prompt import Prompt
from tandemrt.runtime.requests.request import RequestOutput

ROUND_PHASES = tuple(phase for phase in PHASES if phase != "prefill")  # the phases of every round


@dataclass(frozen=True)
class Measurement:
    """Figures of all repeats, with speculation or without."""

    seconds: list[float]  # per repeat
    tokens: int  # per repeat
    metrics: Metrics  # over all repeats
    outputs: list[RequestOutput]  # of the last repeat

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    @property
    def ms_per_round(self) -> dict[str, float]:
        """Host milliseconds per round, by phase."""
        return {phase: 1e3 * self.metrics.seconds[phase] / max(1, self.metrics.rounds) for phase in ROUND_PHASES}

    @property
    def acceptance_per_position(self) -> list[float]:
        """For each position of the draft window, the share of windows in which it was accepted."""
        return [count / max(1, self.metrics.steps) for count in self.metrics.accepted]

    def to_json(self) -> dict[str, Any]:
        return {
            "tokens_per_second": self.tokens_per_second,
            "seconds": self.seconds,
            "tokens": self.tokens,
            "rounds": self.metrics.rounds,
            "waits": self.metrics.waits,
            "acceptance_length": self.metrics.acceptance_length,
            "acceptance_per_position": self.acceptance_per_position,
            "ms_per_round": self.ms_per_round,
        }


@dataclass(frozen=True)
class Comparison:
    """Autoregressive decoding and speculation on the same requests."""

    autoregressive: Measurement
    speculative: Measurement
    same_text: int  # requests with equal tokens in both

    @property
    def speedup(self) -> float:
        """Median over the repeats of time without / time with speculation. The runs of a pair are consecutive."""
        pairs = zip(self.autoregressive.seconds, self.speculative.seconds, strict=True)
        return statistics.median(autoregressive / speculative for autoregressive, speculative in pairs)

    def to_json(self) -> dict[str, Any]:
        return {
            "autoregressive": self.autoregressive.to_json(),
            "speculative": self.speculative.to_json(),
            "speedup": self.speedup,
            "requests": len(self.autoregressive.outputs),
            "same_text": self.same_text,
        }


class OpenLLM(Protocol):
    """Function that opens the bundle with speculation or without."""

    def __call__(self, *, speculating: bool) -> LLM: ...


def compare(
    open_llm: OpenLLM,
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams],
    *,
    repeats: int,
    on_repeat: Callable[[], None] = lambda: None,
) -> Comparison:
    """Run ``prompts`` ``repeats`` times with and without speculation, after one warm-up run."""
    with open_llm(speculating=False) as autoregressive, open_llm(speculating=True) as speculative:
        llms = (autoregressive, speculative)
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
            Measurement(
                seconds[i], sum(len(o.token_ids) for o in outputs[i]), llms[i].metrics.since(starts[i]), outputs[i]
            )
            for i in range(2)
        ]
    same = sum(a.token_ids == b.token_ids for a, b in zip(*outputs, strict=True))
    return Comparison(measures[0], measures[1], same)

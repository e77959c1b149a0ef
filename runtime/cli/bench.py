"""Measure the same requests with and without speculation, alternately, so that machine noise affects both."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.prompt import Prompt
from tandemrt.runtime.requests.request import RequestOutput


@dataclass(frozen=True)
class Measurement:
    """Figures of all repeats, with speculation or without. From ``rounds`` on they are those of Metrics."""

    outputs: list[RequestOutput]  # of the last repeat
    seconds: list[float]  # per repeat
    tokens: int  # per repeat
    rounds: int
    waits: int
    acceptance_length: float
    acceptance_per_position: list[float]
    ms_per_round: dict[str, float]  # of the host, by phase

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    def to_json(self) -> dict[str, Any]:
        figures = {name: value for name, value in vars(self).items() if name != "outputs"}
        return {"tokens_per_second": self.tokens_per_second, **figures}


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
        counted = [llm.metrics.since(start) for llm, start in zip(llms, starts, strict=True)]
    measures = [
        Measurement(
            outputs[i],
            seconds[i],
            sum(len(output.token_ids) for output in outputs[i]),
            metrics.rounds,
            metrics.waits,
            metrics.acceptance_length,
            metrics.acceptance_per_position,
            metrics.host_ms_per_round,
        )
        for i, metrics in enumerate(counted)
    ]
    same = sum(a.token_ids == b.token_ids for a, b in zip(*outputs, strict=True))
    return Comparison(measures[0], measures[1], same)

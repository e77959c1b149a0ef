"""Compare texts with and without speculation, and measure the time of a round."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.plugins.operators.constants import Purpose
from tandemrt.plugins.reference import position_noise
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.check.decoder_run import DecoderRunner
from tandemrt.runtime.check.logits import TOLERANCES
from tandemrt.runtime.check.result import CheckResult, passed_if
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import RequestOutput

COUNT = 20
_PROMPT, _OUTPUT = 24, 48  # tokens, at most


@dataclass(frozen=True)
class GeneratedTexts:
    """Outputs of all requests, and figures of a run after warm-up.

    Attributes:
        acceptance: tokens per request and round.
    """

    outputs: list[RequestOutput]
    seconds: float
    rounds: int
    acceptance: float


def check_texts(llm: LLM) -> Iterator[CheckResult]:
    """Generate every text with and without speculation, and report differences with their distance from a tie.

    Even texts are greedy, odd texts are sampled with a seed at temperature 0.7.
    """
    prompts, params = _requests(llm)
    autoregressive = _generate(llm, prompts, params, num_draft_tokens=0)
    yield _milliseconds("round of autoregressive decoding", llm, autoregressive)
    if llm.bundle.draft.kind == "none":
        yield CheckResult(
            "texts with speculation", "autoregressive decoding", "the bundle drafts nothing", "not applicable"
        )
        return
    speculative = _generate(llm, prompts, params, num_draft_tokens=None)
    yield _milliseconds("round with speculation", llm, speculative)
    with llm.loop.streams.active():
        target, exact = llm.loop.target.engines["target"], llm.bundle.engine("target").batch_invariant
        yield compare_texts(autoregressive, speculative, params, target, batch_invariant=exact)


def compare_texts(
    autoregressive: GeneratedTexts,
    speculative: GeneratedTexts,
    params: Sequence[SamplingParams],
    target: Engine,
    *,
    batch_invariant: bool = False,
) -> CheckResult:
    """Compare texts that must be equal. ``target`` recomputes the logits at a difference, to detect a tie.

    On a CPU and for a batch-invariant target ties are failures too, because calls with any number of tokens give the
    same bits there.
    """
    differences = []
    for number, (a, b) in enumerate(zip(autoregressive.outputs, speculative.outputs, strict=True)):
        if a.token_ids != b.token_ids or a.finish_reason != b.finish_reason:
            differences.append((number, *_first_difference(target, a, b, params[number])))
    exact = batch_invariant or device_of(target.device).on_host
    untied = [number for number, _, gap, tie in differences if exact or gap > tie]
    errors = sum(output.finish_reason == "error" for output in (*autoregressive.outputs, *speculative.outputs))
    count = len(params)
    result = f"{count - len(differences)} of {count} equal"
    for number, at, gap, tie in differences:
        kind = f"a tie here is below {tie:.2g}" if gap <= tie else f"no tie, which would be below {tie:.2g}"
        result += f"; text {number} differs at token {at}, where the logits are {gap:.2g} apart ({kind})"
    return CheckResult(
        "texts with speculation",
        "autoregressive decoding",
        result + (f"; {errors} ended in an error: {_first_error(autoregressive, speculative)}" if errors else ""),
        passed_if(not untied and not errors),
        {
            "texts": count,
            "equal": count - len(differences),
            "tied": len(differences) - len(untied),
            "acceptance_length": speculative.acceptance,
        },
    )


def _requests(llm: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    limits, draw = llm.bundle.limits, Random(7)
    longest = max(1, min(_PROMPT, limits.length // 2))
    delimiters = llm.bundle.reasoning
    control = {*(delimiters.think_start.ids if delimiters else ()), *llm.bundle.stop_ids}
    tokens = [token for token in range(llm.bundle.valid_tokens) if token not in control]
    prompts = [[draw.choice(tokens) for _ in range(draw.randint(1, longest))] for _ in range(COUNT)]
    output = min(_OUTPUT, limits.length - longest)
    params = [
        SamplingParams(temperature=0.7 * (number % 2), seed=number, max_tokens=output, ignore_eos=True)
        for number in range(COUNT)
    ]
    return prompts, params


def _generate(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams], *, num_draft_tokens: int | None
) -> GeneratedTexts:
    params = [p.model_copy(update={"num_draft_tokens": num_draft_tokens}) for p in params]
    llm.generate(list(prompts), params)  # warm-up: the first calls compile, capture and allocate
    before, start = llm.metrics.copy(), time.perf_counter()
    outputs = llm.generate(list(prompts), params)
    seconds = time.perf_counter() - start
    metrics = llm.metrics.since(before)
    return GeneratedTexts(outputs, seconds, metrics.rounds, metrics.acceptance_length)


def _milliseconds(check: str, llm: LLM, texts: GeneratedTexts) -> CheckResult:
    ms = 1e3 * texts.seconds / max(1, texts.rounds)
    result = f"{ms:.2f} ms with up to {min(COUNT, llm.bundle.limits.batch)} requests, short prompts included"
    if texts.acceptance > 1:
        result += f"; {texts.acceptance:.2f} tokens per request and round"
    return CheckResult(check, "", result, "measured", {"ms": ms, "rounds": texts.rounds})


def _first_difference(
    target: Engine, a: RequestOutput, b: RequestOutput, params: SamplingParams
) -> tuple[int, float, float]:
    """Return the first position where the tokens differ, the gap between their logits there, and the gap of a tie.

    The logits of sampled texts include the noise.
    """
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if at is None:  # one is a prefix of the other, which no tie explains
        return min(len(a.token_ids), len(b.token_ids)), float("inf"), 0.0
    context = [*a.prompt_token_ids, *a.token_ids[:at]]
    runner, logits = DecoderRunner(target, 1), torch.empty(0)
    for position, token in enumerate(context):
        logits = runner.run(0, torch.tensor([[token]]), [position], torch.tensor([[0]]))[0, 0]
    scores = logits
    if params.temperature > 0:
        noise = position_noise(a.seed, len(context), Purpose.SAMPLE, len(logits))
        scores = logits + params.temperature * torch.from_numpy(noise)
    tie = TOLERANCES[target.contract["logits"].dtype] * float(logits.abs().max())
    return at, abs(float(scores[a.token_ids[at]] - scores[b.token_ids[at]])), tie


def _first_error(*texts: GeneratedTexts) -> str | None:
    return next(output.error for each in texts for output in each.outputs if output.finish_reason == "error")

"""Texts with speculation against plain decoding, and what a round takes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch

from tandemrt.engines.params import SamplingParams
from tandemrt.plugins.operators import Purpose
from tandemrt.plugins.reference import position_noise
from tandemrt.runtime.backends.base import Engine
from tandemrt.runtime.check.finding import Finding, judged
from tandemrt.runtime.check.logits import TOLERANCES
from tandemrt.runtime.check.walk import Decoder
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.requests.outputs import RequestOutput

COUNT = 20
_PROMPT, _OUTPUT = 24, 48  # tokens, at most


@dataclass(frozen=True)
class Texts:
    """All requests answered one way, and how long that took when everything was warm."""

    outputs: list[RequestOutput]
    seconds: float
    rounds: int
    acceptance: float


def check_texts(llm: LLM) -> Iterator[Finding]:
    """Generate every text with and without speculation; a difference comes with how near it was to a tie.

    Even texts are greedy, odd ones seeded at temperature 0.7.
    """
    prompts, params = _requests(llm)
    plain = _generate(llm, prompts, params, window=0)
    yield _milliseconds("round of plain decoding", llm, plain)
    if llm.bundle.draft.kind == "none":
        yield Finding("texts with speculation", "plain decoding", "the bundle drafts nothing", "not applicable")
        return
    speculated = _generate(llm, prompts, params, window=None)
    yield _milliseconds("round with speculation", llm, speculated)
    with llm.loop.clock.active():
        yield compared(plain, speculated, params, llm.loop.tandem.engines["target"])


def compared(plain: Texts, speculated: Texts, params: Sequence[SamplingParams], target: Engine) -> Finding:
    """Compare texts that should be equal; ``target`` tells how near a difference was to a tie.

    A CPU has no excuse: a window and a single token give the same bits there.
    """
    differences = []
    for number, (a, b) in enumerate(zip(plain.outputs, speculated.outputs, strict=True)):
        if a.token_ids != b.token_ids or a.finish_reason != b.finish_reason:
            differences.append((number, *_gap(target, a, b, params[number])))
    on_cpu = target.device.type == "cpu"
    untied = [number for number, _, gap, tie in differences if on_cpu or gap > tie]
    errors = sum(output.finish_reason == "error" for output in (*plain.outputs, *speculated.outputs))
    count = len(params)
    result = f"{count - len(differences)} of {count} equal"
    for number, at, gap, tie in differences:
        kind = f"a tie here is below {tie:.2g}" if gap <= tie else f"no tie, which would be below {tie:.2g}"
        result += f"; text {number} differs at token {at}, where the logits are {gap:.2g} apart ({kind})"
    return Finding(
        "texts with speculation",
        "plain decoding",
        result + (f"; {errors} ended in an error: {_first_error(plain, speculated)}" if errors else ""),
        judged(not untied and not errors),
        {
            "texts": count,
            "equal": count - len(differences),
            "tied": len(differences) - len(untied),
            "acceptance_length": speculated.acceptance,
        },
    )


def _requests(llm: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    limits, draw = llm.bundle.limits, Random(7)
    longest = max(1, min(_PROMPT, limits.length // 2))
    markers = llm.bundle.markers
    control = {*(markers.start.ids if markers else ()), *llm.bundle.stop_ids}
    tokens = [token for token in range(llm.bundle.valid_tokens) if token not in control]
    prompts = [[draw.choice(tokens) for _ in range(draw.randint(1, longest))] for _ in range(COUNT)]
    output = min(_OUTPUT, limits.length - longest)
    params = [
        SamplingParams(temperature=0.7 * (number % 2), seed=number, max_tokens=output, ignore_eos=True)
        for number in range(COUNT)
    ]
    return prompts, params


def _generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], *, window: int | None) -> Texts:
    asked = [p.model_copy(update={"window": window}) for p in params]
    llm.generate(list(prompts), asked)  # the first calls compile, capture and allocate
    before, start = llm.metrics.copy(), time.perf_counter()
    outputs = llm.generate(list(prompts), asked)
    seconds = time.perf_counter() - start
    metrics = llm.metrics.since(before)
    return Texts(outputs, seconds, metrics.rounds, 1 + sum(metrics.accepted) / max(1, metrics.steps))


def _milliseconds(check: str, llm: LLM, texts: Texts) -> Finding:
    ms = 1e3 * texts.seconds / max(1, texts.rounds)
    result = f"{ms:.2f} ms with up to {min(COUNT, llm.bundle.limits.batch)} requests, short prompts included"
    if texts.acceptance > 1:
        result += f"; {texts.acceptance:.2f} tokens per request and round"
    return Finding(check, "", result, "measured", {"ms": ms, "rounds": texts.rounds})


def _gap(target: Engine, a: RequestOutput, b: RequestOutput, params: SamplingParams) -> tuple[int, float, float]:
    """Where two texts part, how far their tokens' logits (with noise, if drawn) are apart there, and what is a tie."""
    pairs = zip(a.token_ids, b.token_ids, strict=False)
    at = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
    if at is None:  # one is the beginning of the other: no tie explains that
        return min(len(a.token_ids), len(b.token_ids)), float("inf"), 0.0
    context = [*a.prompt_token_ids, *a.token_ids[:at]]
    decoder, logits = Decoder(target, 1), torch.empty(0)
    for place, token in enumerate(context):
        logits = decoder(0, torch.tensor([[token]]), [place], torch.tensor([[0]]))[0, 0]
    scores = logits
    if params.temperature > 0:
        noise = position_noise(a.seed, len(context), Purpose.SAMPLE, len(logits))
        scores = logits + params.temperature * torch.from_numpy(noise)
    tie = TOLERANCES[target.contract["logits"].dtype] * float(logits.abs().max())
    return at, abs(float(scores[a.token_ids[at]] - scores[b.token_ids[at]])), tie


def _first_error(*texts: Texts) -> str | None:
    return next(output.error for each in texts for output in each.outputs if output.finish_reason == "error")

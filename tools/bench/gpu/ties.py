"""Count texts that differ with and without speculation, at ties that a GPU may round either way."""

from collections.abc import Sequence
from typing import Any

from tandemrt import LLM
from tandemrt.engines.bundle.bundle import Bundle
from tools.bench.gpu import requests

PROMPT, TOKENS = 64, 64


def count_diverged(llm: LLM, bundle: Bundle, count: int, temperature: float, window: int) -> dict[str, Any]:
    """Return how many of ``count`` texts differ with ``window`` drafted tokens, at which tokens, and how many drafted
    tokens were accepted.
    """
    prompts = requests.prompts(bundle, count, PROMPT, seed=1)
    texts = []
    for drafted in (0, window):
        params = requests.unconstrained(bundle, count, PROMPT, temperature, drafted)
        params = [each.model_copy(update={"max_tokens": TOKENS}) for each in params]
        outputs = llm.generate(prompts, params)
        accepted = sum(output.speculation.num_accepted_draft_tokens for output in outputs)
        texts.append([output.token_ids for output in outputs])
    places = [first_difference(one, other) for one, other in zip(*texts, strict=True)]
    at = sorted(place for place in places if place is not None)
    return {"texts": count, "tokens": TOKENS, "accepted": accepted, "diverged": len(at), "at": at}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index at which tokens differ, the end of the shorter list included; None if equal."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = None if len(one) == len(other) else min(len(one), len(other))
    return next((at for at, (a, b) in pairs if a != b), shorter)

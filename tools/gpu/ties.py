"""How many texts part from plain decoding's when they are speculated: at ties, which a GPU may round either way."""

from collections.abc import Sequence
from typing import Any

from tandemrt import LLM
from tandemrt.engines.bundle import Bundle
from tools.gpu import requests

PROMPT, TOKENS = 64, 64


def parted(llm: LLM, bundle: Bundle, count: int, temperature: float, window: int) -> dict[str, Any]:
    """``count`` texts without speculation and with ``window`` drafted tokens: how many part, and where they do."""
    prompts = requests.prompts(bundle, count, PROMPT, seed=1)
    texts = []
    for drafted in (0, window):
        params = requests.plain(bundle, count, PROMPT, temperature, drafted)
        params = [each.model_copy(update={"max_tokens": TOKENS}) for each in params]
        texts.append([output.token_ids for output in llm.generate(prompts, params)])
    places = [first_difference(one, other) for one, other in zip(*texts, strict=True)]
    at = sorted(place for place in places if place is not None)
    return {"texts": count, "tokens": TOKENS, "parted": len(at), "at": at}


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which tokens differ, the end of the shorter list included; None if they are equal."""
    pairs = enumerate(zip(one, other, strict=False))
    shorter = None if len(one) == len(other) else min(len(one), len(other))
    return next((at for at, (a, b) in pairs if a != b), shorter)

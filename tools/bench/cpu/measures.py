"""The five measures. Every engine gets the same tokens and generates the same number."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

OUT = 128  # tokens of a text
STREAMS, STREAM_TOKENS = 8, 64
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 3, "maxItems": 6},
        "count": {"type": "integer"},
        "note": {"type": "string", "maxLength": 200},
    },
    "required": ["name", "tags", "count", "note"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Measure:
    """A measure: the request to engines, and the figure computed from seconds and output tokens."""

    title: str
    asked: dict[str, Any]
    figure: Callable[[float, int], float]
    more_is_better: bool = False


def measures(vocab: int, texts: Sequence[list[int]] | None = None) -> dict[str, Measure]:
    """Return the measures by name, for a model of ``vocab`` ids.

    ``texts``: prompts of real tokens; default random ones.
    """
    draw = Random(0)

    def prompt(length: int) -> list[int]:
        if texts:
            text = draw.choice(texts)
            return (text * -(-length // len(text)))[:length]
        return [draw.randrange(300, vocab - 8) for _ in range(length)]

    phrase = prompt(24)
    return {
        "prompt": Measure("prompt of 512, ms to the first token", _ask([prompt(512)], 1), _milliseconds),
        "autoregressive": Measure("autoregressive, ms per token", _ask([prompt(32)], OUT), _per_token),
        "streams": Measure(
            f"{STREAMS} streams, tokens/s",
            _ask([prompt(64) for _ in range(STREAMS)], STREAM_TOKENS),
            lambda seconds, tokens: tokens / seconds,
            more_is_better=True,
        ),
        "schema": Measure("JSON schema, ms per token", _ask([prompt(32)], 96, schema=json.dumps(_SCHEMA)), _per_token),
        "speculation": Measure(
            "speculation on a repeating text, ms per token", _ask([phrase * 8], OUT, speculate=True), _per_token
        ),
    }


def _ask(prompts: list[list[int]], tokens: int, *, schema: str = "", speculate: bool = False) -> dict[str, Any]:
    return {"prompts": prompts, "tokens": tokens, "schema": schema, "speculate": speculate}


def _milliseconds(seconds: float, _tokens: int) -> float:
    return 1e3 * seconds


def _per_token(seconds: float, tokens: int) -> float:
    return 1e3 * seconds / tokens

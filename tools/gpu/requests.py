"""The requests of a line: random prompts, plain or with everything a request may ask for."""

from random import Random

from tandemrt import SamplingParams, StructuredOutputs
from tandemrt.engines.bundle import Bundle

# Long enough not to end while it is measured: random text closes a string now and then, never all of them.
SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 64}


def prompts(bundle: Bundle, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Random tokens, none of them a marker or a stop token; every prompt is another one, for every seed."""
    assert bundle.markers is not None
    special = min(bundle.markers.start.ids + bundle.stop_ids) - 1  # tools/filler_tokenizer.py puts them last
    draw = Random(f"{length} {seed}")
    return [[draw.randrange(special) for _ in range(length)] for _ in range(count)]


def plain(
    bundle: Bundle, count: int, length: int, temperature: float, window: int, accepted: float | None = None
) -> list[SamplingParams]:
    """Nothing asked but a temperature; ``accepted``: and, where anything is drafted, so many tokens a round by the rule
    synthetic."""
    room = bundle.limits.length - length
    rule = {} if accepted is None or not window else {"rule": "synthetic", "synthetic_acceptance_length": accepted}
    asked = {"temperature": temperature, "window": window, "ignore_eos": True, "max_tokens": room, **rule}
    return [SamplingParams.model_validate({**asked, "seed": i}) for i in range(count)]


def constrained(
    bundle: Bundle, count: int, length: int, temperature: float, window: int, budget: int
) -> list[SamplingParams]:
    """A JSON schema, a budget of ``budget`` reasoning tokens and a seed; prompts must end with ``opened``."""
    asked = {"thinking_token_budget": budget, "structured_outputs": StructuredOutputs(json=SCHEMA)}
    return [each.model_copy(update=asked) for each in plain(bundle, count, length, temperature, window)]


def opened(bundle: Bundle, texts: list[list[int]]) -> list[list[int]]:
    """The prompts with reasoning begun at their end, as long as before."""
    assert bundle.markers is not None
    start = list(bundle.markers.start.ids)
    return [text[: len(text) - len(start)] + start for text in texts]

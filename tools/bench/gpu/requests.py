"""Requests of a line: random prompts, with sampling parameters only or with every constraint."""

from random import Random

from tandemrt import SamplingParams, StructuredOutputs
from tandemrt.engines.bundle.bundle import Bundle

# Long enough not to end during a measurement: random text rarely closes 64 strings.
SCHEMA = {"type": "array", "items": {"type": "string"}, "minItems": 64}


def prompts(bundle: Bundle, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Return random tokens without special tokens. All prompts of all seeds differ."""
    assert bundle.reasoning is not None
    # tools/models/filler_tokenizer.py puts special tokens last
    special = min(bundle.reasoning.think_start.ids + bundle.stop_ids) - 1
    draw = Random(f"{length} {seed}")
    return [[draw.randrange(special) for _ in range(length)] for _ in range(count)]


def unconstrained(
    bundle: Bundle, count: int, length: int, temperature: float, window: int, accepted: float | None = None
) -> list[SamplingParams]:
    """Return parameters with a temperature only.

    ``accepted``: tokens per round by the rule ``synthetic``, for requests with drafts.
    """
    room = bundle.limits.length - length
    rule = {} if accepted is None or not window else {"rule": "synthetic", "synthetic_acceptance_length": accepted}
    asked = {"temperature": temperature, "num_draft_tokens": window, "ignore_eos": True, "max_tokens": room, **rule}
    return [SamplingParams.model_validate({**asked, "seed": i}) for i in range(count)]


def constrained(
    bundle: Bundle, count: int, length: int, temperature: float, window: int, budget: int
) -> list[SamplingParams]:
    """Return parameters with a JSON schema and a thinking budget; prompts must come from ``opened``."""
    asked = {"thinking_token_budget": budget, "structured_outputs": StructuredOutputs(json=SCHEMA)}
    return [each.model_copy(update=asked) for each in unconstrained(bundle, count, length, temperature, window)]


def opened(bundle: Bundle, texts: list[list[int]]) -> list[list[int]]:
    """Return the prompts with think_start at their end; the length stays the same."""
    assert bundle.reasoning is not None
    start = list(bundle.reasoning.think_start.ids)
    return [text[: len(text) - len(start)] + start for text in texts]

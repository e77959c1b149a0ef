"""Requests with random pictures, and the proof that drafts change none of their texts."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.images import Image as Patches

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMATS = (
    StructuredOutputs(json=SCHEMA),
    StructuredOutputs(json={"type": "array", "items": {"enum": ["an", "and"]}, "maxItems": 3}),
    StructuredOutputs(regex="(the|an)( end){1,3}"),
    StructuredOutputs(choice=["the end", "the and"]),
)


def picture(seed: int, width: int = 48, height: int = 32) -> Image.Image:
    colours = np.random.default_rng(seed).integers(0, 256, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(colours).resize((width, height))


def normalized(image: Patches) -> np.ndarray:
    """The patches of an image as the tower's graph normalizes them."""
    mean, std = (np.repeat(colour, image.entry.patch_size**2) for colour in (image.entry.mean, image.entry.std))
    return image.patches * (1 / 255 / std).astype(np.float32) - (mean / std).astype(np.float32)


def asked(*parts: str | Image.Image) -> list[dict[str, Any]]:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part} for part in parts
    ]
    return [{"role": "user", "content": content}]


def drawn_request(draw: random.Random, most_images: int = 3) -> tuple[list[dict[str, Any]], SamplingParams]:
    parts: list[str | Image.Image] = []
    for _ in range(draw.randint(0, most_images)):
        parts += [
            "the and " * draw.randint(0, 9),
            picture(draw.randint(0, 4), draw.randint(8, 90), draw.randint(8, 60)),
        ]
    params = SamplingParams(
        temperature=draw.choice((0.0, 0.8)),
        seed=draw.randint(0, 99),
        max_tokens=draw.randint(1, 24),
        num_draft_tokens=draw.randint(1, 4),
        thinking_token_budget=draw.choice((None, 0, 3)),
        structured_outputs=draw.choice((None, None, *FORMATS)),
        presence_penalty=draw.choice((0.0, 0.0, 0.7)),
        n=draw.choice((1, 1, 2)),
        logprobs=draw.choice((None, 1)),
    )
    return asked(*parts, "end"), params


def require_same_texts_without_drafts(
    llm: LLM, count: int, liked: Sequence[int] = (), *, most_images: int = 3, accepts: bool = True
) -> None:
    """Send random requests together and then alone without drafts; texts and logprobs are equal, bit for bit.

    ``liked``: tokens that every request prefers. ``accepts``: some drafts must be accepted.
    """
    draw, bias = random.Random(3), dict.fromkeys(liked, 30.0)
    drawn = [drawn_request(draw, most_images) for _ in range(count)]
    requests = [(messages, params.model_copy(update={"logit_bias": bias})) for messages, params in drawn]
    together = llm.generate([messages for messages, _ in requests], [params for _, params in requests])
    if accepts:
        assert sum(result.speculation.num_accepted_draft_tokens for result in together) > 0
    for (messages, params), result in zip(requests, together, strict=True):
        alone = llm.chat(messages, params.model_copy(update={"num_draft_tokens": 0}))
        for output, expected in zip(result.outputs, alone.outputs, strict=True):
            assert output.token_ids == expected.token_ids
            assert output.finish_reason == expected.finish_reason
            assert output.logprobs == expected.logprobs

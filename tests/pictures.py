"""Requests with random pictures, and the proof that drafts change none of their texts."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import numpy as np
from PIL import Image

from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.images import Image as Patches
from tandemrt.runtime.requests.request import Request, RequestOutput, StreamOutput
from tandemrt.runtime.requests.running import RunningRequest
from tests.waiting import PATIENCE_S

_AT_ONCE = 12  # requests
_MOST_LACKED = 4  # times that a request lacks memory
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


class Sent:
    """A request, which is cancelled after ``cancel_after`` tokens, and its outputs in their order."""

    def __init__(self, llm: LLM, messages: Any, params: SamplingParams, cancel_after: int | None) -> None:
        self._ended: list[Future[RequestOutput]] = [Future() for _ in range(params.n)]
        self._llm, self._cancel_after, self._tokens = llm, cancel_after, 0
        self._request: Future[Request] = Future()
        self._request.set_result(llm.submit(messages, params, self._listen))

    @property
    def outputs(self) -> list[RequestOutput]:
        return [ended.result(PATIENCE_S) for ended in self._ended]

    def _listen(self, item: StreamOutput) -> None:
        self._tokens += len(item.token_ids)
        if self._cancel_after is not None and self._tokens >= self._cancel_after:
            self._request.add_done_callback(lambda request: self._llm.cancel(request.result()))
        if item.output is not None:
            self._ended[item.index].set_result(item.output)


@contextmanager
def short_of_memory(llm: LLM, every: int) -> Iterator[None]:
    """Preempt the youngest request each ``every`` times that a request needs more memory.

    But few times for each request: a prompt of more than ``every`` chunks would otherwise begin again without end.
    """
    slots, calls, lacked = llm.loop.slots, count(1), Counter[Request]()
    grow = slots.grow

    def grow_or_lack(running: RunningRequest) -> bool:
        if next(calls) % every or lacked[running.request] >= _MOST_LACKED:
            return grow(running)
        lacked[running.request] += 1
        return False

    slots.grow = grow_or_lack  # type: ignore[method-assign]
    try:
        yield
    finally:
        slots.grow = grow  # type: ignore[method-assign]


def require_same_texts_without_drafts(
    llm: LLM,
    number: int,
    liked: Sequence[int] = (),
    *,
    most_images: int = 3,
    accepts: bool = True,
    interrupted: bool = True,
) -> None:
    """Send random requests together and then alone without drafts; texts and logprobs are equal, bit for bit.

    ``liked``: tokens that every request prefers. ``accepts``: some drafts must be accepted. ``interrupted``: some
    are preempted, and others cancelled.
    """
    draw, bias = random.Random(3), dict.fromkeys(liked, 30.0)
    drawn = [drawn_request(draw, most_images) for _ in range(number)]
    requests = [(messages, params.model_copy(update={"logit_bias": bias})) for messages, params in drawn]
    together: list[RequestOutput] = []
    before = llm.metrics.preemptions
    with short_of_memory(llm, every=9) if interrupted else nullcontext():
        for first in range(0, number, _AT_ONCE):
            wave = requests[first : first + _AT_ONCE]
            sent = [Sent(llm, *wave[at], 4 if interrupted and at % 4 == 1 else None) for at in range(len(wave))]
            together += [output for each in sent for output in each.outputs]
    assert llm.metrics.preemptions > before or not interrupted or number < _AT_ONCE
    if accepts:
        assert sum(output.speculation.num_accepted_draft_tokens for output in together) > 0
    results = iter(together)
    for messages, params in requests:
        alone = llm.chat(messages, params.model_copy(update={"num_draft_tokens": 0}))
        for expected in alone.outputs:
            output = next(results)
            known = slice(len(output.token_ids) if output.finish_reason == "cancelled" else None)
            assert output.token_ids == expected.token_ids[known]
            assert output.finish_reason in (expected.finish_reason, "cancelled")
            assert output.logprobs == (None if expected.logprobs is None else expected.logprobs[known])

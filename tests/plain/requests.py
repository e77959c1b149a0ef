"""Requests without a model: what the scheduler and the request's own tests feed by hand."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandemrt import SamplingParams, StreamOutput
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.requests.request import Request, Rules
from tandemrt.runtime.requests.text import Transcript


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that characters, markers and stop strings straddle tokens as badly as they can."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER.encode(text).ids
    return encoded


def ready(constraint: Constraint) -> "Future[Rules]":
    rules: Future[Rules] = Future()
    rules.set_result(Rules(constraint))
    return rules


def make_request(
    listener: Callable[[StreamOutput], None] = lambda _: None,
    *,
    prompt: Sequence[int] = (0,),
    rules: "Future[Rules] | None" = None,
    thinking: bool = False,
    budget: int | None = None,
    window: int = 4,
    stop: Sequence[str] = (),
    **params: Any,
) -> Request:
    """A request over bytes; with ``thinking``, blocks are ``<think>`` to ``</think>``, a token per character."""
    start, end = tuple(ids("<think>")), tuple(ids("</think>"))
    rule = ThinkingRule(start, (end,), end, budget=budget) if thinking else None
    return Request(
        prompt,
        SamplingParams(**params),
        seed=0,
        max_tokens=100,
        window=window,
        rules=ready(Constraint(256, (), thinking=rule, prompt=prompt)) if rules is None else rules,
        transcript=Transcript(TOKENIZER, stop),
        listener=listener,
    )

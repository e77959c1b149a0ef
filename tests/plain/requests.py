"""Requests without a model, for tests of requests, slots and the scheduler."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandemrt import SamplingParams, StreamOutput
from tandemrt.engines.text.vocabulary import vocabulary_from_tokenizer
from tandemrt.runtime.caches.hashes import BlockHashes
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.running import QueuedRequest, RequestConstraints, RunningRequest
from tandemrt.runtime.requests.text import TextStream
from tandemrt.runtime.workers.clients import Client


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that characters, delimiters and stop strings straddle tokens as badly as they can."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


MANY = 1 << 20  # tokens to prefill: requests join whatever others have
TOKENIZER = byte_tokenizer()
VOCABULARY = vocabulary_from_tokenizer(TOKENIZER, 256)


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER.encode(text).ids
    return encoded


def ready(constraint: Constraint) -> "Future[RequestConstraints]":
    constraints: Future[RequestConstraints] = Future()
    constraints.set_result(RequestConstraints(constraint))
    return constraints


def make_queued(
    listener: Callable[[StreamOutput], None] = lambda _: None,
    *,
    prompt: Sequence[int] = (0,),
    constraints: "Future[RequestConstraints] | None" = None,
    thinking: bool = False,
    budget: int | None = None,
    window: int = 4,
    stop: Sequence[str] = (),
    client: str = "",
    user: str = "",
    hashes: BlockHashes | None = None,
    streams: bool = True,
    **params: Any,
) -> QueuedRequest:
    """A request over bytes; with ``thinking``, blocks are ``<think>`` to ``</think>``, a token per character."""
    start, end = tuple(ids("<think>")), tuple(ids("</think>"))
    rule = ThinkingRule(start, (end,), end, budget=budget, vocabulary=VOCABULARY) if thinking else None
    sampling = SamplingParams(**params)
    return QueuedRequest(
        Request(
            prompt,
            sampling,
            seed=0,
            max_tokens=100,
            num_draft_tokens=window,
            client=Client(client, user),
            listener=listener,
            streams=streams,
        ),
        ready(Constraint(256, (), thinking=rule, prompt=prompt)) if constraints is None else constraints,
        TextStream(TOKENIZER, stop),
        Penalties(prompt, sampling) if sampling.adjusts_logits else None,
        hashes,
    )


def make_running(*args: Any, slot: int = 0, **kwargs: Any) -> RunningRequest:
    """The same request in a slot."""
    return RunningRequest(make_queued(*args, **kwargs), slot)

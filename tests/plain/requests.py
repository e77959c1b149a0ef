"""Requests without a model: what the scheduler and the request's own tests feed by hand."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tandemrt import SamplingParams, StreamOutput
from tandemrt.engines.vocabulary import vocabulary_from_tokenizer
from tandemrt.runtime.caches.hashes import BlockHashes
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.requests.penalties import Penalties
from tandemrt.runtime.requests.request import Request
from tandemrt.runtime.requests.running import Running
from tandemrt.runtime.requests.text import Transcript
from tandemrt.runtime.requests.waiting import Enforcement, Waiting


def byte_tokenizer() -> Tokenizer:
    """One token per byte, so that characters, markers and stop strings straddle tokens as badly as they can."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()
VOCABULARY = vocabulary_from_tokenizer(TOKENIZER, 256)


def ids(text: str) -> list[int]:
    encoded: list[int] = TOKENIZER.encode(text).ids
    return encoded


def ready(constraint: Constraint) -> "Future[Enforcement]":
    enforcement: Future[Enforcement] = Future()
    enforcement.set_result(Enforcement(constraint))
    return enforcement


def make_waiting(
    listener: Callable[[StreamOutput], None] = lambda _: None,
    *,
    prompt: Sequence[int] = (0,),
    enforcement: "Future[Enforcement] | None" = None,
    thinking: bool = False,
    budget: int | None = None,
    window: int = 4,
    stop: Sequence[str] = (),
    client: str = "",
    hashes: BlockHashes | None = None,
    **params: Any,
) -> Waiting:
    """A request over bytes; with ``thinking``, blocks are ``<think>`` to ``</think>``, a token per character."""
    start, end = tuple(ids("<think>")), tuple(ids("</think>"))
    rule = ThinkingRule(start, (end,), end, budget=budget, vocabulary=VOCABULARY) if thinking else None
    sampling = SamplingParams(**params)
    return Waiting(
        Request(prompt, sampling, seed=0, max_tokens=100, window=window, client=client, listener=listener),
        ready(Constraint(256, (), thinking=rule, prompt=prompt)) if enforcement is None else enforcement,
        Transcript(TOKENIZER, stop),
        Penalties.of(prompt, sampling),
        hashes,
    )


def make_running(*args: Any, slot: int = 0, **kwargs: Any) -> Running:
    """The same request in a slot."""
    return Running(make_waiting(*args, **kwargs), slot)

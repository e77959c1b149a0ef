"""Chunked prefill: the prompt tokens that a round processes, within one token budget, first come first served."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from tandemrt.engines.contract.contract import BLOCK_SIZE


class Chunk(NamedTuple):
    """Tokens [start, end) of the text in ``slot``, which are not in the caches yet."""

    slot: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


def plan(
    missing: Iterable[Chunk],
    budget: int,
    *,
    at_block_ends: bool = False,
    whole: Mapping[int, Sequence[tuple[int, int]]] = MappingProxyType({}),
) -> tuple[Chunk, ...]:
    """Return the first ``budget`` tokens of ``missing``, one text after the other.

    ``at_block_ends``: a chunk ends at the last end of a KV cache block that it reaches. Chunks that reach none end with
    their text, or wait for another call, except for the first of a call.

    ``whole``: by slot, spans of tokens that no chunk ends in. The first chunk of a call has all of such a span, beyond
    the budget.
    """
    chunks: list[Chunk] = []
    for slot, start, end in missing:
        reached = min(start + budget, end)
        if at_block_ends:
            block_end = reached // BLOCK_SIZE * BLOCK_SIZE
            if block_end > start:
                reached = block_end
            elif reached < end and chunks:
                break
        for begin, after in whole.get(slot, ()):
            if begin < reached < after:
                reached = begin if begin > start or chunks else after
        if reached > start:
            chunks.append(Chunk(slot, start, reached))
            budget -= reached - start
    return tuple(chunks)


def group_equal_chunks(chunks: Iterable[Chunk]) -> list[tuple[Chunk, ...]]:
    """Group ``chunks`` into calls over a linear cache: chunks of equal length in adjacent slots share a call."""
    groups: list[list[Chunk]] = []
    for chunk in sorted(chunks):
        if groups and (groups[-1][-1].slot + 1, groups[-1][-1].tokens) == (chunk.slot, chunk.tokens):
            groups[-1].append(chunk)
        else:
            groups.append([chunk])
    return [tuple(each) for each in groups]


def num_tokens(chunks: Sequence[Chunk]) -> int:
    """The number of tokens in all ``chunks``."""
    return sum(chunk.tokens for chunk in chunks)

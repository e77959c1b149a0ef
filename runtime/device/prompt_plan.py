"""Chunked prefill: the prompt tokens that a round processes, within one token budget, first come first served."""

from collections.abc import Iterable, Sequence
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


def plan(missing: Iterable[Chunk], budget: int) -> tuple[Chunk, ...]:
    """Return the first ``budget`` tokens of ``missing``, one text after the other."""
    chunks = []
    for slot, start, end in missing:
        count = min(budget, end - start)
        if count > 0:
            chunks.append(Chunk(slot, start, start + count))
            budget -= count
    return tuple(chunks)


def at_block_ends(chunks: Iterable[Chunk]) -> tuple[Chunk, ...]:
    """Shorten ``chunks`` to the last end of a KV cache block within them, where there is one."""
    ends = ((chunk, chunk.end // BLOCK_SIZE * BLOCK_SIZE) for chunk in chunks)
    return tuple(chunk._replace(end=end) if end > chunk.start else chunk for chunk, end in ends)


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

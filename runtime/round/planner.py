"""Which prompt tokens go into the caches in a round: one budget, filled from all prompts in the order they joined."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """Tokens [start, end) of the text in ``slot``: missing in the caches, or on their way there."""

    slot: int
    start: int
    end: int

    @property
    def tokens(self) -> int:
        return self.end - self.start


def plan(missing: Iterable[Chunk], budget: int) -> tuple[Chunk, ...]:
    """At most ``budget`` tokens of ``missing`` in all: one text after the other, each as far as the budget goes."""
    chunks = []
    for slot, start, end in missing:
        count = min(budget, end - start)
        if count > 0:
            chunks.append(Chunk(slot, start, start + count))
            budget -= count
    return tuple(chunks)


def rectangles(chunks: Iterable[Chunk]) -> list[tuple[Chunk, ...]]:
    """``chunks`` of different slots by calls over a linear cache: equally long ones of slots side by side are one."""
    found: list[list[Chunk]] = []
    for chunk in sorted(chunks):
        if found and (found[-1][-1].slot + 1, found[-1][-1].tokens) == (chunk.slot, chunk.tokens):
            found[-1].append(chunk)
        else:
            found.append([chunk])
    return [tuple(each) for each in found]


def total(chunks: Sequence[Chunk]) -> int:
    """Tokens of all ``chunks``."""
    return sum(chunk.tokens for chunk in chunks)

"""The common prefix of two texts or lists of tokens."""

from collections.abc import Sequence
from typing import Any


def common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many items at the start of ``one`` and ``other`` are equal."""
    for at, (ours, theirs) in enumerate(zip(one, other, strict=False)):
        if ours != theirs:
            return at
    return min(len(one), len(other))

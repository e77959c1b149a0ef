"""Mask rows as int32 words: bit ``token % 32`` of word ``token // 32`` allows ``token``."""

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from tandemrt.engines.contract.masks import mask_words

ALL = np.int32(-1)
_BITS = np.left_shift(1, range(32)).astype(np.int32)


class FixedRow:
    """An immutable mask row, int32[words], with cached properties."""

    def __init__(self, words: np.ndarray) -> None:
        self.words = words
        self._ints = words.data  # a memoryview, which is three times as fast to index

    def allows(self, token: int) -> bool:
        """Return whether the row allows ``token``; see the function ``allows``."""
        return 0 <= token < 32 * len(self._ints) and bool(self._ints[token >> 5] >> (token & 31) & 1)

    @cached_property
    def only(self) -> int | None:
        """The only token that the row allows, or None if it allows no token or several."""
        return only(self.words)

    @cached_property
    def empty(self) -> bool:
        """Whether the row allows no token."""
        return not self.words.any()


def allows(row: np.ndarray, token: int) -> bool:
    """Return whether an int32[words] row allows ``token``; False for an id without a bit in the row."""
    return 0 <= token < 32 * row.size and bool((int(row[token >> 5]) >> (token & 31)) & 1)


def only(row: np.ndarray) -> int | None:
    """Return the only token that an int32[words] row allows, or None if it allows no token or several."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return None
    bits = int(row.view(np.uint32)[words[0]])
    return None if bits & (bits - 1) else 32 * int(words[0]) + bits.bit_length() - 1


def base_row(vocab_size: int, valid_tokens: int, banned: Iterable[int], allowed: Iterable[int] | None) -> np.ndarray:
    """Return an int32[words] row of the ids below ``valid_tokens`` or, if given, of ``allowed``, without ``banned``."""
    bits = np.zeros(32 * mask_words(vocab_size), bool)
    if allowed is None:
        bits[:valid_tokens] = True
    else:
        bits[list(allowed)] = True
    bits[list(banned)] = False
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def without(row: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    """Return a copy of ``row`` that allows none of ``tokens``."""
    copy = row.copy()
    for token in tokens:
        forbid(copy, token)
    return copy


def forbid(row: np.ndarray, token: int) -> None:
    row[token >> 5] &= ~_BITS[token & 31]


def allow(row: np.ndarray, token: int) -> None:
    row[token >> 5] |= _BITS[token & 31]


def allow_only(row: np.ndarray, token: int) -> None:
    """Let ``row`` allow only ``token``."""
    row.fill(0)
    allow(row, token)

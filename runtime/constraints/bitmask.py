"""Mask rows: int32 words, bit ``token % 32`` of word ``token // 32`` allows that token."""

from collections.abc import Iterable
from functools import cached_property

import numpy as np

from tandemrt.engines.contract import mask_words

ALL = np.int32(-1)
_BITS = np.left_shift(1, range(32)).astype(np.int32)


class FixedRow:
    """An int32[words] row that nobody changes any more, and what every round asks of it."""

    def __init__(self, words: np.ndarray) -> None:
        self.words = words
        self._ints = words.data  # gives a plain integer in a third of the time of an array

    def allows(self, token: int) -> bool:
        """As the function of that name."""
        return 0 <= token < 32 * len(self._ints) and bool(self._ints[token >> 5] >> (token & 31) & 1)

    @cached_property
    def only(self) -> int | None:
        """The one token that it allows; None if it allows another number of them."""
        return only(self.words)

    @cached_property
    def empty(self) -> bool:
        """Whether it allows no token."""
        return not self.words.any()


def allows(row: np.ndarray, token: int) -> bool:
    """Whether an int32[words] row allows ``token``; False for an id the row has no bit for."""
    return 0 <= token < 32 * row.size and bool((int(row[token >> 5]) >> (token & 31)) & 1)


def only(row: np.ndarray) -> int | None:
    """The one token that an int32[words] row allows; None if it allows another number of them."""
    words = np.flatnonzero(row)
    if len(words) != 1:
        return None
    bits = int(row.view(np.uint32)[words[0]])
    return None if bits & (bits - 1) else 32 * int(words[0]) + bits.bit_length() - 1


def base_row(vocab_size: int, valid_tokens: int, banned: Iterable[int], allowed: Iterable[int] | None) -> np.ndarray:
    """An int32[words] row of the ids below ``valid_tokens`` that are not banned and, given a list, are in it."""
    bits = np.zeros(32 * mask_words(vocab_size), bool)
    if allowed is None:
        bits[:valid_tokens] = True
    else:
        bits[list(allowed)] = True
    bits[list(banned)] = False
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def without(row: np.ndarray, tokens: Iterable[int]) -> np.ndarray:
    """A copy of ``row`` that allows none of ``tokens``."""
    copy = row.copy()
    for token in tokens:
        forbid(copy, token)
    return copy


def forbid(row: np.ndarray, token: int) -> None:
    row[token >> 5] &= ~_BITS[token & 31]


def allow(row: np.ndarray, token: int) -> None:
    row[token >> 5] |= _BITS[token & 31]


def allow_only(row: np.ndarray, token: int) -> None:
    """Make ``row`` a single bit."""
    row.fill(0)
    allow(row, token)

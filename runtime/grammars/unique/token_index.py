"""The tokens of a vocabulary in the order of their bytes, and those that may end one value and go on with another."""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tandemrt.engines.text.vocabulary import Vocabulary

_SPACE = b" \t\n\r"
_Search = Callable[[bytes], object]
# A comma with what follows it, or the end of a number, because equality.may_become is not exact for all numbers.
_NEXT = rb"(?:,[ \t\n\r]*[^ \t\n\r]|[0-9][ \t\n\r,\]}])"
_GOES_ON, _GOES_ON_AFTER_STRING = re.compile(_NEXT, re.DOTALL), re.compile(rb'".*' + _NEXT, re.DOTALL)
_COMMA, _COMMA_AFTER_STRING = re.compile(rb",[ \t\n\r]*\Z"), re.compile(rb'".*,[ \t\n\r]*\Z', re.DOTALL)


@dataclass(frozen=True)
class Sorted:
    """Texts in ascending order, and the token that each belongs to."""

    texts: list[bytes]
    ids: np.ndarray

    def narrowed(self, prefix: bytes, begin: int, end: int) -> tuple[int, int]:
        """Return the part of ``begin`` to ``end`` whose texts start with ``prefix``, not empty and not of 0xFF."""
        low = bisect_left(self.texts, prefix, begin, end)
        if low == end or not self.texts[low].startswith(prefix):
            return low, low
        return low, bisect_left(self.texts, prefix[:-1] + bytes([prefix[-1] + 1]), low, end)


@dataclass(frozen=True)
class Crossing:
    """Ids of tokens that may end a value and go on, by where the text is before them."""

    in_string: np.ndarray
    elsewhere: np.ndarray


class TokenIndex:
    """The tokens of one vocabulary.

    Attributes:
        all: every token with a text.
        after_space: what follows the white space at the beginning of tokens.
        spaces: the tokens of white space only.
        crossing: tokens that may end a value and begin another one.
        opening: those of them that may also open an array.
        comma: tokens that may end a value, and end before the next one.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        tokens = vocabulary.tokens
        self.tokens = tokens
        pairs = [(text, token) for token, text in enumerate(tokens) if text]
        self.all = _sorted(pairs)
        stripped = [(text.lstrip(_SPACE), token) for text, token in pairs if text[0] in _SPACE]
        self.after_space = _sorted([pair for pair in stripped if pair[0]])
        self.spaces = np.array([token for text, token in stripped if not text], np.int32)
        self.crossing = _crossing(pairs, _GOES_ON_AFTER_STRING.search, _GOES_ON.search)
        self.comma = _crossing(pairs, _COMMA_AFTER_STRING.search, _COMMA.search)
        opening = [pair for pair in pairs if b"[" in pair[0]]
        self.opening = _crossing(opening, _GOES_ON_AFTER_STRING.search, _GOES_ON.search)


def token_index(vocabulary: Vocabulary) -> TokenIndex:
    """Return the index of a vocabulary, which is built once."""
    if TokenIndex not in vocabulary.derived:
        vocabulary.derived[TokenIndex] = TokenIndex(vocabulary)
    index = vocabulary.derived[TokenIndex]
    assert isinstance(index, TokenIndex)
    return index


def allowed(ids: np.ndarray, row: np.ndarray) -> Iterator[int]:
    """Yield those of ``ids`` that a mask row allows."""
    yield from ids[(row[ids >> 5] >> (ids & 31)) & 1 == 1].tolist()


def first_allowed(row: np.ndarray, count: int) -> Iterator[int]:
    """Yield the first ``count`` tokens that a mask row allows."""
    for word in np.flatnonzero(row)[:count].tolist():
        bits = int(row[word]) & 0xFFFFFFFF
        while bits and count:
            low = bits & -bits
            yield 32 * word + low.bit_length() - 1
            bits, count = bits ^ low, count - 1


def forbid(ids: np.ndarray, row: np.ndarray) -> None:
    """Forbid ``ids``, each of them once, in a mask row."""
    np.bitwise_and.at(row, ids >> 5, ~np.left_shift(np.int32(1), ids & 31))


def _sorted(pairs: list[tuple[bytes, int]]) -> Sorted:
    starts: dict[bytes, list[tuple[bytes, int]]] = {}  # sorted apart, because sorting blocks all other threads
    for pair in pairs:
        starts.setdefault(pair[0][:2], []).append(pair)
    ordered = [pair for start in sorted(starts) for pair in sorted(starts[start])]
    return Sorted([text for text, _ in ordered], np.array([token for _, token in ordered], np.int32))


def _crossing(pairs: list[tuple[bytes, int]], in_string: _Search, elsewhere: _Search) -> Crossing:
    leaving = [(text, token) for text, token in pairs if elsewhere(text)]
    return Crossing(
        np.array([token for text, token in leaving if in_string(text)], np.int32),
        np.array([token for _, token in leaving], np.int32),
    )

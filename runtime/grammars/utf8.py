"""Which tokens keep a text UTF-8: an engine that reads characters loosely would let in bytes that are none."""

from functools import cached_property

import numpy as np

from tandemrt.engines.contract import mask_words

# What may come next, by state: the bytes and the state behind each. Overlong forms, surrogates and what lies beyond
# U+10FFFF have no way through (the Unicode standard, table 3-7).
START = 0
_MORE = range(0x80, 0xC0)
_WAYS: tuple[tuple[tuple[range, int], ...], ...] = (
    (
        (range(0x80), START), (range(0xC2, 0xE0), 1), (range(0xE0, 0xE1), 4), (range(0xE1, 0xED), 2),
        (range(0xED, 0xEE), 5), (range(0xEE, 0xF0), 2), (range(0xF0, 0xF1), 6), (range(0xF1, 0xF4), 3),
        (range(0xF4, 0xF5), 7),
    ),
    ((_MORE, START),),
    ((_MORE, 1),),
    ((_MORE, 2),),
    ((range(0xA0, 0xC0), 1),),
    ((range(0x80, 0xA0), 1),),
    ((range(0x90, 0xC0), 2),),
    ((range(0x80, 0x90), 2),),
)  # fmt: skip
STATES = len(_WAYS)
_REFUSED = STATES


class Utf8:
    """The states of a text in UTF-8, over the tokens of a vocabulary."""

    def __init__(self, tokens: tuple[bytes, ...]) -> None:
        self._tokens = tokens

    @cached_property
    def _after(self) -> np.ndarray:
        """uint8 [states, tokens]: the state behind each token, ``_REFUSED`` where it is no text."""
        steps = np.full((STATES + 1, 256), _REFUSED, np.uint8)
        for state, ways in enumerate(_WAYS):
            for found, after in ways:
                steps[state, found.start : found.stop] = after
        behind = np.empty((STATES, len(self._tokens)), np.uint8)
        behind[:, :] = np.where(np.arange(STATES) == START, START, _REFUSED)[:, None]
        for index, token in enumerate(self._tokens):
            if not token:
                behind[:, index] = np.arange(STATES)
            elif not token.isascii():
                states = np.arange(STATES)
                for byte in token:
                    states = steps[states, byte]
                behind[:, index] = states
        return behind

    @cached_property
    def rows(self) -> np.ndarray:
        """int32 [states, words]: the tokens that keep the text UTF-8 in each state."""
        bits = np.zeros((STATES, 32 * mask_words(len(self._tokens))), bool)
        bits[:, : len(self._tokens)] = self._after != _REFUSED
        return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)

    def step(self, state: int, token: int) -> int | None:
        """The state behind ``token``, or None where it is no text."""
        after = int(self._after[state, token])
        return None if after == _REFUSED else after

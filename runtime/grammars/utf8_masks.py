"""Mask rows that keep a text valid UTF-8, because xgrammar's character classes also allow other bytes."""

from functools import cached_property

import numpy as np

from tandemrt.engines.contract.masks import mask_words

# Transitions by state: ranges of bytes, and the state after each. Overlong forms, surrogates and code points above
# U+10FFFF have no transition (the Unicode standard, table 3-7).
START = 0
_CONTINUATION = range(0x80, 0xC0)
_TRANSITIONS: tuple[tuple[tuple[range, int], ...], ...] = (
    (
        (range(0x80), START), (range(0xC2, 0xE0), 1), (range(0xE0, 0xE1), 4), (range(0xE1, 0xED), 2),
        (range(0xED, 0xEE), 5), (range(0xEE, 0xF0), 2), (range(0xF0, 0xF1), 6), (range(0xF1, 0xF4), 3),
        (range(0xF4, 0xF5), 7),
    ),
    ((_CONTINUATION, START),),
    ((_CONTINUATION, 1),),
    ((_CONTINUATION, 2),),
    ((range(0xA0, 0xC0), 1),),
    ((range(0x80, 0xA0), 1),),
    ((range(0x90, 0xC0), 2),),
    ((range(0x80, 0x90), 2),),
)  # fmt: skip
STATES = len(_TRANSITIONS)
_REJECTED = STATES


class Utf8:
    """The UTF-8 automaton over the tokens of a vocabulary."""

    def __init__(self, tokens: tuple[bytes, ...]) -> None:
        self._tokens = tokens

    @cached_property
    def _after(self) -> np.ndarray:
        """uint8 [states, tokens]: the state after each token, ``_REJECTED`` for invalid UTF-8."""
        steps = np.full((STATES + 1, 256), _REJECTED, np.uint8)
        for state, transitions in enumerate(_TRANSITIONS):
            for byte_range, after in transitions:
                steps[state, byte_range.start : byte_range.stop] = after
        ends = np.empty((STATES, len(self._tokens)), np.uint8)
        ends[:, :] = np.where(np.arange(STATES) == START, START, _REJECTED)[:, None]
        for index, token in enumerate(self._tokens):
            if not token:
                ends[:, index] = np.arange(STATES)
            elif not token.isascii():
                states = np.arange(STATES)
                for byte in token:
                    states = steps[states, byte]
                ends[:, index] = states
        return ends

    @cached_property
    def rows(self) -> np.ndarray:
        """int32 [states, words]: the tokens that keep the text valid UTF-8, by state."""
        bits = np.zeros((STATES, 32 * mask_words(len(self._tokens))), bool)
        bits[:, : len(self._tokens)] = self._after != _REJECTED
        return np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)

    def step(self, state: int, token: int) -> int | None:
        """Return the state after ``token``, or None for invalid UTF-8."""
        after = int(self._after[state, token])
        return None if after == _REJECTED else after

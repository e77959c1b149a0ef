"""Words that a text must not hold, however they are spelled: masks for the tokens that would complete one.

An Aho-Corasick automaton over bytes (Aho and Corasick, "Efficient string matching", 1975). A node is the longest end of
the text that begins a word, so looking ahead in a drafted window is copying an integer, and a word is found across
windows.
"""

from collections.abc import Sequence

import numpy as np

from tandemrt.engines.contract import mask_words
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.constraints import bitmask

ROOT = 0


class BadWords:
    """The automaton of some words over one vocabulary. Immutable but for what it has worked out; share it freely.

    ``words`` are not empty; ``width`` is that of the logits.
    """

    def __init__(self, words: Sequence[bytes], vocabulary: Vocabulary, width: int) -> None:
        self._vocabulary = vocabulary
        self._width = width
        self._words = tuple(dict.fromkeys(words))
        self._prefixes = [b"", *sorted({word[:end] for word in self._words for end in range(1, len(word))}, key=len)]
        self._node = {prefix: node for node, prefix in enumerate(self._prefixes)}
        self._within = {token for word in self._words for token in vocabulary.holding(word)}
        self._allowed: dict[int, np.ndarray] = {}

    def step(self, node: int, token: int) -> int:
        """Return the node behind ``token``, which completes no word."""
        spelled = self._vocabulary.tokens[token]
        for byte in spelled:
            text = self._prefixes[node] + bytes([byte])
            node = next(found for at in range(len(text) + 1) if (found := self._node.get(text[at:])) is not None)
        return node

    def allowed(self, node: int) -> np.ndarray:
        """An int32[words] row of the tokens that complete no word behind ``node``. Nobody changes it."""
        if node not in self._allowed:
            prefix = self._prefixes[node]
            ends = [prefix[at:] for at in range(len(prefix))]
            rests = {word[len(end) :] for end in ends for word in self._words if word.startswith(end)}
            refused = {token for rest in rests if rest for token in self._vocabulary.beginning_with(rest)}
            row = np.full(mask_words(self._width), bitmask.ALL, np.int32)
            self._allowed[node] = bitmask.without(row, [*refused, *self._within])
        return self._allowed[node]

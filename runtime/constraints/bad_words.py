"""Bad words: texts that the output must not contain, whatever tokens they consist of.

An Aho-Corasick automaton over bytes (Aho and Corasick, "Efficient string matching", 1975) finds the tokens that would
complete a word. A node stands for the longest suffix of the text that begins a word. The state is therefore one
integer: a lookahead copies it, and a word is found across steps.
"""

from collections.abc import Sequence

import numpy as np

from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.runtime.grammars import bitmask

ROOT = 0


class BadWords:
    """The automaton of several non-empty words over one vocabulary. Requests may share it: only its row cache changes.

    ``width`` is the width of the logits.
    """

    def __init__(self, words: Sequence[bytes], vocabulary: Vocabulary, width: int) -> None:
        self._vocabulary = vocabulary
        self._width = width
        self._words = tuple(dict.fromkeys(words))
        self._prefixes = [b"", *sorted({word[:end] for word in self._words for end in range(1, len(word))}, key=len)]
        self._node = {prefix: node for node, prefix in enumerate(self._prefixes)}
        self._within = {token for word in self._words for token in vocabulary.tokens_containing(word)}
        self._allowed: dict[int, np.ndarray] = {}

    def step(self, node: int, token: int) -> int:
        """Return the node after ``token``, which must not complete a word."""
        for byte in self._vocabulary.tokens[token]:
            text = self._prefixes[node] + bytes([byte])
            node = next(child for at in range(len(text) + 1) if (child := self._node.get(text[at:])) is not None)
        return node

    def allowed(self, node: int) -> np.ndarray:
        """Return the int32[words] row of tokens that complete no word after ``node``. Do not write to it."""
        if node not in self._allowed:
            prefix = self._prefixes[node]
            ends = [prefix[at:] for at in range(len(prefix))]
            rests = {word[len(end) :] for end in ends for word in self._words if word.startswith(end)}
            rejected = {token for rest in rests if rest for token in self._vocabulary.tokens_with_prefix(rest)}
            row = np.full(mask_words(self._width), bitmask.ALL, np.int32)
            self._allowed[node] = bitmask.without(row, [*rejected, *self._within])
        return self._allowed[node]

"""Logit biases and penalties of one request: the tokens whose logits a round adjusts."""

from collections.abc import Sequence

import numpy as np

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.runtime.device.adjust_buffers import AdjustEntries


class Penalties:
    """Token counts and biases of one request, updated with its output; see ``SamplingParams.adjusts_logits``.

    Output tokens get entries only if a penalty counts them, and prompt tokens only for the repetition penalty.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.repetition = params.repetition_penalty
        self._counting = (self.presence, self.frequency, self.repetition) != (0, 0, 1)
        self._counted = len(prompt)  # tokens of the text
        self._index: dict[int, int] = {}  # column by token
        self._columns = np.zeros((3, 64), np.int32)  # see AdjustEntries
        self._bias = np.zeros(64, np.float32)
        if self.repetition != 1:
            for token in prompt:
                index = self._column(token)
                self._columns[2, index] = 1
        for token, bias in (params.logit_bias or {}).items():
            index = self._column(token)
            self._bias[index] = bias

    def entries(self, text: Sequence[int], draft: Sequence[int]) -> AdjustEntries:
        """Return the entries for ``text`` (prompt and output) and the drafted tokens that follow it.

        A drafted token that is new gets an entry for this round only: it counts from the next row on, and verification
        may reject it.
        """
        if self._counting:
            for token in text[self._counted :]:
                index = self._column(token)
                self._columns[1, index] += 1
            self._counted = len(text)
            fresh = [token for token in dict.fromkeys(draft) if token not in self._index]
        else:
            fresh = []
        known, count = len(self._index), len(self._index) + len(fresh)
        self._reserve(count)
        self._columns[:, known:count], self._bias[known:count] = 0, 0
        self._columns[0, known:count] = fresh
        columns, bias = self._columns[:, :count], self._bias[:count]
        return AdjustEntries(columns, bias, self.presence, self.frequency, self.repetition)

    def _column(self, token: int) -> int:
        """Return the token's column, a new one if it has none. May reallocate ``_columns`` and ``_bias``."""
        index = self._index.get(token)
        if index is None:
            index = self._index[token] = len(self._index)
            self._reserve(index + 1)
            self._columns[:, index], self._bias[index] = (token, 0, 0), 0
        return index

    def _reserve(self, count: int) -> None:
        if count > len(self._bias):
            capacity = max(count, 2 * len(self._bias))
            added = capacity - len(self._bias)
            self._columns = np.concatenate([self._columns, np.zeros((3, added), np.int32)], axis=1)
            self._bias = np.concatenate([self._bias, np.zeros(added, np.float32)])

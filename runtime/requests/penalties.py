"""The tokens of one request whose logits are adjusted: its biases, and what its penalties count."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandemrt.engines.params import SamplingParams


class Listed(NamedTuple):
    """Entries of a round (contract.adjust). Valid until the next ones are asked for."""

    columns: npt.NDArray[np.int32]  # [3, entries]: token, times in the output, whether in the prompt
    bias: npt.NDArray[np.float32]  # [entries]


class Penalties:
    """Grows with the output of its request.

    The output is counted only if a penalty reads it, and the prompt listed only for the repetition penalty: a request
    that has nothing but biases lists nothing else.
    """

    def __init__(self, prompt: Sequence[int], params: SamplingParams) -> None:
        self.presence = params.presence_penalty
        self.frequency = params.frequency_penalty
        self.repetition = params.repetition_penalty
        self._counting = (self.presence, self.frequency, self.repetition) != (0, 0, 1)
        self._counted = len(prompt)  # tokens of the text
        self._place: dict[int, int] = {}  # column of a token
        self._columns = np.zeros((3, 64), np.int32)
        self._bias = np.zeros(64, np.float32)
        if self.repetition != 1:
            for token in prompt:
                place = self._column(token)
                self._columns[2, place] = 1
        for token, bias in (params.logit_bias or {}).items():
            place = self._column(token)
            self._bias[place] = bias

    @classmethod
    def of(cls, prompt: Sequence[int], params: SamplingParams) -> "Penalties | None":
        """What ``params`` ask for, None if that is nothing."""
        penalties = cls(prompt, params)
        return penalties if penalties._counting or params.logit_bias else None

    def listed(self, text: Sequence[int], draft: Sequence[int]) -> Listed:
        """The entries for ``text`` (prompt and all output so far) and the tokens drafted behind it.

        A drafted token that stands nowhere yet is an entry for this round alone: it counts from the row behind it on,
        and may be refused.
        """
        if self._counting:
            for token in text[self._counted :]:
                place = self._column(token)
                self._columns[1, place] += 1
            self._counted = len(text)
            fresh = [token for token in dict.fromkeys(draft) if token not in self._place]
        else:
            fresh = []
        known, count = len(self._place), len(self._place) + len(fresh)
        self._reserve(count)
        self._columns[:, known:count], self._bias[known:count] = 0, 0
        self._columns[0, known:count] = fresh
        return Listed(self._columns[:, :count], self._bias[:count])

    def _column(self, token: int) -> int:  # may give the columns other memory
        place = self._place.get(token)
        if place is None:
            place = self._place[token] = len(self._place)
            self._reserve(place + 1)
            self._columns[:, place], self._bias[place] = (token, 0, 0), 0
        return place

    def _reserve(self, count: int) -> None:
        if count > len(self._bias):
            room = max(count, 2 * len(self._bias))
            self._columns = np.concatenate([self._columns, np.zeros((3, room - len(self._bias)), np.int32)], axis=1)
            self._bias = np.concatenate([self._bias, np.zeros(room - len(self._bias), np.float32)])

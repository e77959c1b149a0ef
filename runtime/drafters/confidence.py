"""How many more accepted tokens a draft promises, by its own probabilities of the tokens that it has drafted."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Confidence:
    """The chance that all drafted tokens of a row are accepted, for the ``slots`` of a round.

    A draft that drafts the likely tokens of its target is accepted about as often as it is certain. The next token can
    only be accepted if all before it are, so a round ends where this chance is too low to pay for another token.
    ``column_of``: the draft's column of each token of the target, for a draft with a part of them.
    """

    def __init__(self, slots: Sequence[int], column_of: npt.NDArray[np.int64] | None = None) -> None:
        self._slots = list(slots)
        self._column_of = column_of
        self._chances = np.ones(len(self._slots))

    def follow(self, logits: npt.NDArray[np.floating], tokens: npt.NDArray[np.int64]) -> float:
        """Return the mean chance after the next drafted ``tokens`` [batch], of ``logits`` [batch, width]."""
        rows = logits[self._slots].astype(np.float32)
        weights = np.exp(rows - rows.max(axis=-1, keepdims=True))
        drafted = tokens[self._slots] >= 0
        known = np.where(drafted, tokens[self._slots], 0)
        columns = known if self._column_of is None else self._column_of[known]
        own = np.take_along_axis(weights, columns[:, None], axis=-1)[:, 0]
        self._chances *= np.where(drafted, own / weights.sum(axis=-1), 0.0)
        return float(self._chances.mean())

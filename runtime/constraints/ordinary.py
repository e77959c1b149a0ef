"""Ordinary tokens: allowed ones that are no stop tokens and begin no delimiter. They only lengthen a text."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

_UNKNOWN, _ORDINARY, _OTHER = 0, 1, 2


class OrdinaryTokens:
    """Which of ``size`` token ids are ordinary, by ``decide``. Each token is decided when a text first has it."""

    def __init__(self, size: int, decide: Callable[[int], bool]) -> None:
        self._decide = decide
        self._kinds = np.zeros(size, np.uint8)

    def __contains__(self, token: int) -> bool:
        """Return whether ``token``, any integer, is ordinary."""
        if not 0 <= token < len(self._kinds):
            return False
        kind = self._kinds[token]
        if kind == _UNKNOWN:
            kind = self._kinds[token] = _ORDINARY if self._decide(token) else _OTHER
        return bool(kind == _ORDINARY)

    def among(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return for each of ``tokens``, integers of any shape, whether it is ordinary."""
        kinds = self._kinds.take(tokens, mode="clip")
        if not kinds.all():
            for token in np.unique(tokens[kinds == _UNKNOWN]).tolist():
                _ = token in self
            kinds = self._kinds.take(tokens, mode="clip")
        ordinary: npt.NDArray[np.bool_] = kinds == _ORDINARY
        return ordinary & (tokens >= 0) & (tokens < len(self._kinds))

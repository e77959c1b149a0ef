"""What a grammar engine must do for a constraint (runtime/grammars has those there are)."""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Protocol

import numpy as np


class Grammar(Protocol):
    """It sees answer tokens only and terminates by accepting one of ``stop_ids``."""

    @property
    def stop_ids(self) -> Set[int]: ...

    def fill(self, row: np.ndarray) -> None:
        """Write int32[words]: the tokens that may come next. Never called on a terminated grammar."""

    def look_ahead(self, tokens: Sequence[int]) -> None:
        """The rows behind ``tokens`` will be filled: work them out in one call, if that is quicker. Changes none."""

    def accept(self, token: int) -> bool:
        """Advance by one token; False leaves the state as it was."""

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens, termination included."""

    def fork(self) -> "Grammar":
        """An independent grammar in the same state."""

    def is_terminated(self) -> bool:
        """Whether the text is complete and closed."""

    def forced(self) -> list[int]:
        """Tokens that spell what the text must go on with; none where there is a choice. Other tokens may spell the
        same, so this says what to draft, not what a row allows."""


def accepts(grammar: Grammar, tokens: Sequence[int]) -> bool:
    """Whether ``grammar`` takes all of ``tokens``. Leaves no trace."""
    with taken_back(grammar, tokens) as taken:
        return taken == len(tokens)


@contextmanager
def taken_back(grammar: Grammar, tokens: Sequence[int]) -> Iterator[int]:
    """Feed ``grammar`` what it takes of ``tokens``, how many that are, and take them back, whatever raises."""
    taken = 0
    try:
        for token in tokens:
            if not grammar.accept(token):
                break
            taken += 1
        yield taken
    finally:
        grammar.rollback(taken)

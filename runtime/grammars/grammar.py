"""The protocol of a grammar matcher: the state of one text in a compiled grammar."""

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Protocol

import numpy as np


class Grammar(Protocol):
    """A matcher of the tokens of one text. It terminates when it accepts one of ``stop_ids``."""

    @property
    def stop_ids(self) -> Set[int]: ...

    def fill_row(self, row: np.ndarray) -> None:
        """Write the mask of allowed next tokens to an int32[words] row. Must not be called after termination."""

    def precompute_rows(self, tokens: Sequence[int]) -> None:
        """Compute the rows after each of ``tokens`` in one call, if that is faster. Changes no result."""

    def accept(self, token: int) -> bool:
        """Advance by one token; False leaves the state unchanged."""

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens. The stop token counts as one."""

    def fork(self) -> "Grammar":
        """Return an independent matcher in the same state."""

    def is_terminated(self) -> bool:
        """Return whether the text is complete and ended by a stop token."""

    def fast_forward_tokens(self) -> list[int]:
        """Return tokens of the text that must come next (fast-forward tokens); empty if there is a choice.

        A row may also allow other tokens of the same text, so the result is good for drafts, not as a mask.
        """


def accepts(grammar: Grammar, tokens: Sequence[int]) -> bool:
    """Return whether ``grammar`` accepts all of ``tokens``. Its state stays the same."""
    with temporarily_accepted(grammar, tokens) as accepted:
        return accepted == len(tokens)


@contextmanager
def temporarily_accepted(grammar: Grammar, tokens: Sequence[int]) -> Iterator[int]:
    """Accept the longest possible prefix of ``tokens``, yield its length, and roll back on exit."""
    accepted = 0
    try:
        for token in tokens:
            if not grammar.accept(token):
                break
            accepted += 1
        yield accepted
    finally:
        grammar.rollback(accepted)

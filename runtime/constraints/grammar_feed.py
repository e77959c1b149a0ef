"""Feed tokens to the grammar of a request, and take them back after a lookahead."""

from collections.abc import Iterator
from contextlib import contextmanager

from tandemrt.runtime.grammars.grammar import Grammar


class GrammarFeed:
    """A grammar and the number of tokens fed since the last ``keep``, which ``undo`` takes back."""

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self._fed = 0

    def accept(self, token: int) -> bool:
        """Advance the grammar by ``token``. Return False, with the state unchanged, if the grammar rejects it."""
        if not self.grammar.accept(token):
            return False
        self._fed += 1
        return True

    def count(self, tokens: int) -> None:
        """Record that the caller fed ``tokens`` tokens to ``grammar`` directly."""
        self._fed += tokens

    def keep(self) -> None:
        """Make the fed tokens final."""
        self._fed = 0

    def undo(self) -> None:
        """Take back the tokens that were fed since the last ``keep``."""
        if self._fed:
            self.grammar.rollback(self._fed)
        self._fed = 0

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Take back the tokens that are fed inside the ``with`` block, also after an exception."""
        fed = self._fed
        try:
            yield
        finally:
            self.grammar.rollback(self._fed - fed)
            self._fed = fed

    def fork(self) -> "GrammarFeed":
        """Return an independent feed in the same state."""
        copy = GrammarFeed(self.grammar.fork())
        copy._fed = self._fed
        return copy

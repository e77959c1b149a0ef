"""Grammars by xgrammar: EBNF in, mask rows out."""

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from tandemrt.engines.contract import mask_words
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.constraints import bitmask
from tandemrt.runtime.grammars import binding
from tandemrt.runtime.grammars.rows import LONGEST_FORCED, check_count, check_fillable
from tandemrt.runtime.grammars.utf8 import START, Utf8


class XGrammar:
    """The state of one request's grammar. Not for two threads at once.

    xgrammar writes wrong memory when handed a strided view and raises on a terminated matcher; both are refused here.
    Its sets of characters let in bytes that are no UTF-8; those are taken out of its rows.
    """

    def __init__(
        self, grammar: "XGrammarGrammar", matcher: binding.GrammarMatcher, stop_ids: Set[int], states: list[int]
    ) -> None:
        self.stop_ids = stop_ids
        self._grammar = grammar
        self._matcher = matcher
        self._states = states  # of the text's UTF-8, behind each token
        stray = frozenset(grammar.stop_ids) - stop_ids
        self._mute = (grammar.spelling_nothing | stray) - stop_ids  # xgrammar refuses each with a line on stderr
        self._stray = sorted(stray)  # end nothing here: xgrammar leaves them in its rows

    def fill(self, row: np.ndarray) -> None:
        """Write int32[words]: the tokens that may come next. Raises InternalError for any other buffer."""
        check_fillable(row, self._grammar.words, ended=self._matcher.is_terminated())
        self._matcher.fill_next_token_bitmask(row)
        row &= self._grammar.utf8.rows[self._states[-1]]
        for token in self._stray:
            bitmask.forbid(row, token)

    def look_ahead(self, tokens: Sequence[int]) -> None:
        """Nothing: a window in one call was not quicker here than row by row."""

    def accept(self, token: int) -> bool:
        """Advance by one token; False leaves the state as it was."""
        if (
            token in self._mute
            or self._matcher.is_terminated()
            or not 0 <= token < len(self._grammar.vocabulary.tokens)
        ):
            return False
        state = self._states[-1] if token in self.stop_ids else self._grammar.utf8.step(self._states[-1], token)
        if state is None or not self._matcher.accept_token(token):
            return False
        self._states.append(state)
        return True

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens."""
        check_count(count)
        self._matcher.rollback(count)
        del self._states[len(self._states) - count :]

    def fork(self) -> "XGrammar":
        return XGrammar(self._grammar, self._matcher.fork(), self.stop_ids, self._states.copy())

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def forced(self) -> list[int]:
        """Tokens that spell what the text must go on with, as far as it matters; none where there is a choice."""
        if self.is_terminated():
            return []
        return self._grammar.vocabulary.spelling(self._matcher.find_jump_forward_string().encode()[:LONGEST_FORCED])


@dataclass(frozen=True)
class XGrammarGrammar:
    """A grammar ready to start. Immutable; share it between requests and threads."""

    compiled: binding.CompiledGrammar
    vocabulary: Vocabulary
    stop_ids: tuple[int, ...]
    spelling_nothing: frozenset[int]
    utf8: Utf8

    @property
    def words(self) -> int:
        return mask_words(len(self.vocabulary.tokens))

    @property
    def size_bytes(self) -> int:
        return int(self.compiled.memory_size_bytes)

    def matcher(self, stop_ids: Iterable[int] | None = None) -> XGrammar:
        """Start from the beginning. ``stop_ids`` end the text, where it is complete and nowhere else; None: those of
        the compiler."""
        stops = frozenset(self.stop_ids if stop_ids is None else stop_ids)
        matcher = binding.GrammarMatcher.of(self.compiled, sorted(stops))
        return XGrammar(self, matcher, stops, [START])


class XGrammarCompiler:
    """Compiles EBNF for one vocabulary. Compiling releases the GIL, may take seconds and cannot be cancelled.

    xgrammar's own cache stays off: it is keyed without the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, stop_ids: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._stop_ids = tuple(stop_ids)
        self._utf8 = Utf8(vocabulary.tokens)
        self._spelling_nothing = frozenset(i for i, token in enumerate(vocabulary.tokens) if not token)
        self._compiler = binding.GrammarCompiler(vocabulary.tokens, self._stop_ids, max_threads=1)

    def compile(self, source: str, root: str = "root") -> XGrammarGrammar:
        """Compile an EBNF grammar whose texts are those of the rule ``root``. Raises ValueError."""
        try:
            compiled = self._compiler.compile_grammar(source, root)
        except RuntimeError as error:
            raise ValueError(_reason(error)) from error
        return XGrammarGrammar(compiled, self._vocabulary, self._stop_ids, self._spelling_nothing, self._utf8)


def _reason(error: Exception) -> str:
    # xgrammar begins its messages with the time and the place in its own sources.
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error).strip())

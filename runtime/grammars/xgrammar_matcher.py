"""The xgrammar implementation of Grammar, for EBNF: compiler, state of one text, and mask rows."""

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.runtime.grammars import bitmask, xgrammar_library
from tandemrt.runtime.grammars.matcher_checks import MAX_FAST_FORWARD_BYTES, check_count, check_fillable
from tandemrt.runtime.grammars.utf8_masks import START, Utf8


class XGrammarMatcher:
    """The state of one request's grammar. Not thread-safe.

    xgrammar corrupts memory for a strided view and raises on a terminated matcher; both raise InternalError here. Its
    character classes allow bytes that are not valid UTF-8; the rows mask these out.
    """

    def __init__(
        self,
        grammar: "XGrammarGrammar",
        matcher: xgrammar_library.NativeMatcher,
        stop_ids: Set[int],
        states: list[int],
    ) -> None:
        self.stop_ids = stop_ids
        self._grammar = grammar
        self._matcher = matcher
        self._states = states  # of the UTF-8 automaton, after each token
        stray = frozenset(grammar.stop_ids) - stop_ids
        self._silent_rejects = (
            grammar.empty_tokens | stray
        ) - stop_ids  # xgrammar would print a line on stderr for each
        self._stray = sorted(stray)  # stop tokens of the compiler, but not of this text; xgrammar's rows allow them

    def fill_row(self, row: np.ndarray) -> None:
        """See Grammar.fill_row. Raises InternalError for a buffer that is not int32[words]."""
        check_fillable(row, self._grammar.words, ended=self._matcher.is_terminated())
        self._matcher.fill_next_token_bitmask(row)
        row &= self._grammar.utf8.rows[self._states[-1]]
        for token in self._stray:
            bitmask.forbid(row, token)

    def precompute_rows(self, tokens: Sequence[int]) -> None:
        """Do nothing: one call for several rows was not faster here than row by row."""

    def accept(self, token: int) -> bool:
        """See Grammar.accept."""
        if (
            token in self._silent_rejects
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

    def fork(self) -> "XGrammarMatcher":
        return XGrammarMatcher(self._grammar, self._matcher.fork(), self.stop_ids, self._states.copy())

    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def fast_forward_tokens(self) -> list[int]:
        """See Grammar.fast_forward_tokens. At most ``MAX_FAST_FORWARD_BYTES`` of text."""
        if self.is_terminated():
            return []
        return self._grammar.vocabulary.tokenize(self._matcher.find_jump_forward_bytes()[:MAX_FAST_FORWARD_BYTES])


@dataclass(frozen=True)
class XGrammarGrammar:
    """A compiled grammar. Requests and threads may share it."""

    compiled: xgrammar_library.NativeGrammar
    vocabulary: Vocabulary
    stop_ids: tuple[int, ...]
    empty_tokens: frozenset[int]  # control tokens and padding
    utf8: Utf8

    @property
    def words(self) -> int:
        return mask_words(len(self.vocabulary.tokens))

    @property
    def size_bytes(self) -> int:
        return int(self.compiled.memory_size_bytes)

    @property
    def exhausted(self) -> bool:
        return False

    def matcher(self, stop_ids: Iterable[int] | None = None) -> XGrammarMatcher:
        """Return a matcher of a new text. ``stop_ids`` end a complete text; None: those of the compiler."""
        stops = frozenset(self.stop_ids if stop_ids is None else stop_ids)
        matcher = xgrammar_library.NativeMatcher.of(self.compiled, sorted(stops))
        return XGrammarMatcher(self, matcher, stops, [START])


class XGrammarCompiler:
    """Compile EBNF for one vocabulary. Compiling releases the GIL, may take seconds and cannot be cancelled.

    xgrammar's own cache is off, because its key does not contain the vocabulary.
    """

    def __init__(self, vocabulary: Vocabulary, stop_ids: Iterable[int]) -> None:
        self._vocabulary = vocabulary
        self._stop_ids = tuple(stop_ids)
        self._utf8 = Utf8(vocabulary.tokens)
        self._empty_tokens = frozenset(i for i, token in enumerate(vocabulary.tokens) if not token)
        self._compiler = xgrammar_library.NativeCompiler(vocabulary.tokens, self._stop_ids, max_threads=1)

    def compile(self, source: str, root: str = "root") -> XGrammarGrammar:
        """Compile an EBNF grammar whose start rule is ``root``. Raises ValueError."""
        try:
            compiled = self._compiler.compile_grammar(source, root)
        except RuntimeError as error:
            raise ValueError(_reason(error)) from error
        return XGrammarGrammar(compiled, self._vocabulary, self._stop_ids, self._empty_tokens, self._utf8)


def _reason(error: Exception) -> str:
    # xgrammar prefixes its messages with the time and a line of its own source.
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error).strip())

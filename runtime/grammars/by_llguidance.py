"""Grammars by llguidance: the state of one, and the mask rows of it. Only this file and its compiler import it."""

from collections.abc import Iterable, Sequence, Set
from itertools import takewhile
from typing import NamedTuple

import llguidance
import numpy as np

from tandemrt.engines.contract import mask_words
from tandemrt.engines.errors import BadRequest, clipped
from tandemrt.engines.vocabulary import Vocabulary
from tandemrt.runtime.constraints import bitmask
from tandemrt.runtime.grammars.rows import LONGEST_FORCED, check_count, check_fillable

SILENT = 0  # of llguidance's log levels
_PARSER = "Parser Error"  # begins llguidance's messages of limits that a lexer has no part in
_LEXER_BYTES, _BYTES_PER_CHARACTER = 1 << 20, 50
_CONTROL = b"\xff"  # what llguidance's bytes of a control token begin with


class LLGuidance:
    """The state of one request's grammar. Not for two threads at once.

    A matcher of llguidance that reached a limit stays in an error, and its copies share one lexer with one limit. So
    that no request pays for another's text, a matcher in an error is replaced by one with a lexer of its own, where it
    was the lexer's limit, and by another copy else. It is fed the same tokens; only if it fails too is the text itself
    too complex.

    Where rows are known ahead, they say what is taken: the matcher is fed those tokens when it is asked next.
    """

    def __init__(
        self, grammar: "GuidanceGrammar", matcher: llguidance.LLMatcher, stop_ids: Set[int], text: Iterable[int] = ()
    ) -> None:
        self.stop_ids = stop_ids
        self._grammar = grammar
        self._matcher = matcher
        self._text = list(text)
        self._fed = len(self._text)  # tokens of the text that the matcher knows
        self._ended = False  # by one of `stop_ids`
        self._rows = np.empty((0, mask_words(grammar.end + 1)), np.int32)
        self._ahead = _Ahead(0, [], self._rows)
        self._forced = 0, b""  # behind so many tokens, the bytes that the text went on with: a long text takes long

    def fill(self, row: np.ndarray) -> None:
        """Write int32[words]: the tokens that may come next. Raises InternalError for any other buffer, BadRequest
        where the text has become too complex."""
        check_fillable(row, self._grammar.words, ended=self._ended)
        known, end = self._ahead.row(self._text), self._grammar.end
        if known is None:
            known = self._computed()
        row[:] = known[: row.size]
        complete = bitmask.allows(known, end)
        if end < 32 * row.size:
            bitmask.forbid(row, end)
        for token in self.stop_ids:
            (bitmask.allow if complete else bitmask.forbid)(row, token)

    def look_ahead(self, tokens: Sequence[int]) -> None:
        """Work out the rows behind ``tokens``, as far as they are taken, in one call."""
        ours = list(takewhile(lambda token: 0 <= token < self._grammar.end and token not in self.stop_ids, tokens))
        if self._ended or not ours:
            return
        self._feed()
        if len(self._rows) <= len(ours):
            self._rows = np.empty((len(ours) + 1, self._rows.shape[1]), np.int32)
        rows = self._rows[: len(ours) + 1]
        self._matcher.unsafe_compute_mask_ptr_with_draft_token(rows.ctypes.data, rows[0].nbytes, ours)
        if self._matcher.is_error():
            self._renew()
            rows = rows[:0]
        known = 1  # rows behind a refused token are not written
        while known < len(rows) and bitmask.allows(rows[known - 1], ours[known - 1]):
            known += 1
        self._ahead = _Ahead(len(self._text), ours, rows[:known])

    def accept(self, token: int) -> bool:
        """Advance by one token; False leaves the state as it was.

        A token that makes the text too complex is taken, whether its row was known or not: whoever asks for the row
        behind it hears that, and so does whoever goes on.
        """
        if self._ended or not 0 <= token < self._grammar.end:
            return False
        known = self._ahead.row(self._text)
        if token in self.stop_ids:
            self._ended = self._is_complete() if known is None else bitmask.allows(known, self._grammar.end)
            return self._ended
        if known is not None:
            taken = bitmask.allows(known, token)
        else:
            self._feed()
            taken = bool(self._matcher.try_consume_tokens([token]))
            if self._matcher.is_error():
                self._renew()
                self._require_sound()
                taken = bool(self._matcher.try_consume_tokens([token])) or self._matcher.is_error()
            self._fed += taken
        if taken:
            self._text.append(token)
        return taken

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens."""
        check_count(count)
        if self._ended and count:
            self._ended, count = False, count - 1
        if not count:
            return
        del self._text[-count:]
        if self._fed > len(self._text):
            self._matcher.rollback(self._fed - len(self._text))
            self._fed = len(self._text)
        if len(self._text) < self._ahead.begin:
            self._ahead = _Ahead(0, [], self._rows[:0])
        if len(self._text) < self._forced[0]:
            self._forced = 0, b""

    def fork(self) -> "LLGuidance":
        self._feed()
        copy = LLGuidance(self._grammar, self._matcher.deep_copy(), self.stop_ids, self._text)
        copy._ended = self._ended
        return copy

    def is_terminated(self) -> bool:
        return self._ended

    def forced(self) -> list[int]:
        """Tokens that spell what the text must go on with, as far as it matters; none where there is a choice."""
        if self._ended:
            return []
        begin, text = self._forced
        tokens = self._grammar.vocabulary.tokens
        since = b"".join(tokens[token] for token in self._text[begin:])
        if len(since) >= len(text) or not text.startswith(since):
            self._feed()
            since, (text, _, _) = b"", bytes(self._matcher.compute_ff_bytes()).partition(_CONTROL)  # of one spelling
            self._forced = len(self._text), text
        return self._grammar.vocabulary.spelling(text[len(since) : len(since) + LONGEST_FORCED])

    def _computed(self) -> np.ndarray:
        """The row of the text so far, with a bit for the end of text of llguidance's own."""
        self._feed()
        row = np.empty(self._rows.shape[1], np.int32)
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        if self._matcher.is_error():
            self._renew()
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            self._require_sound()
        return row

    def _is_complete(self) -> bool:
        self._feed()
        return bool(self._matcher.is_accepting())

    def _feed(self) -> None:
        """Let the matcher know all of the text. Where that is too complex, whoever asks for a row hears it."""
        if self._matcher.is_error():  # at a text that was taken back
            self._renew()
        if self._fed == len(self._text):
            return
        self._matcher.consume_tokens(self._text[self._fed :])
        self._fed = len(self._text)
        if self._matcher.is_error():
            self._renew()

    def _renew(self) -> None:
        # A row of the parser is as long in any matcher; one of its own takes long to make.
        parsers = self._matcher.get_error().startswith(_PARSER)
        self._matcher = self._grammar.copy() if parsers else self._grammar.fresh()
        self._matcher.consume_tokens(self._text)
        self._fed = len(self._text)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise BadRequest(
                f"structured_outputs: the text so far makes the grammar too complex: {_reason(self._matcher)}; "
                "simplify the schema or the expression"
            )


class _Ahead(NamedTuple):
    """Rows that are worked out: behind the first ``begin`` tokens of a text, and behind each of ``tokens`` there."""

    begin: int
    tokens: list[int]
    rows: np.ndarray

    def row(self, text: list[int]) -> np.ndarray | None:
        """The row behind ``text``, which has not been shorter since; None if it is not known."""
        at = len(text) - self.begin
        known = 0 <= at < len(self.rows) and text[self.begin :] == self.tokens[:at]
        return self.rows[at] if known else None


class GuidanceGrammar:
    """A grammar ready to start. Share it between requests and threads."""

    def __init__(
        self, vocabulary: Vocabulary, tokenizer: llguidance.LLTokenizer, source: str, stop_ids: tuple[int, ...]
    ) -> None:
        self.vocabulary = vocabulary
        self.words = mask_words(len(vocabulary.tokens))
        self.end = len(vocabulary.tokens)  # the end of text of llguidance's own; `stop_ids` stand for it here
        self.stop_ids = stop_ids
        self._tokenizer = tokenizer
        self._source = source
        self._first = self.fresh()
        if self._first.is_error():
            raise ValueError(_reason(self._first))
        self._first.compute_bitmask()  # the first row is the slow one, and copies share what it took

    @property
    def size_bytes(self) -> int:
        """An estimate: a lexer grows with what it reads, up to its own limit."""
        return _LEXER_BYTES + _BYTES_PER_CHARACTER * len(self._source)

    def matcher(self, stop_ids: Iterable[int] | None = None) -> LLGuidance:
        """Start from the beginning. ``stop_ids`` end the text, where it is complete and nowhere else; None: those of
        the compiler."""
        return LLGuidance(self, self.copy(), frozenset(self.stop_ids if stop_ids is None else stop_ids))

    def copy(self) -> llguidance.LLMatcher:
        """A matcher that shares a lexer with all other copies."""
        return self._first.deep_copy()

    def fresh(self) -> llguidance.LLMatcher:
        """A matcher that shares nothing with another one."""
        return llguidance.LLMatcher(self._tokenizer, self._source, log_level=SILENT)


def _reason(matcher: llguidance.LLMatcher) -> str:
    lines = matcher.get_error().split("\n\n<state>")[0].strip().split("\n")
    return clipped(lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}")

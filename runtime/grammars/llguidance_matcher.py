"""The llguidance implementation of Grammar: the state of one text, and mask rows."""

import time
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import takewhile
from threading import Lock
from typing import Any, NamedTuple

import llguidance
import numpy as np

from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.text.vocabulary import Vocabulary
from tandemrt.engines.validation.errors import BadRequest, clipped
from tandemrt.runtime.grammars import bitmask
from tandemrt.runtime.grammars.matcher_checks import MAX_FAST_FORWARD_BYTES, check_count, check_fillable

SILENT = 0  # a log level of llguidance
_LEXER = "lexer error"  # prefix of llguidance's errors about limits of the lexer, not of the parser
_USED_UP = "too many expressions"  # in its error after a row that takes too much work, whatever came before
NO_TOKEN = "NoExtensionBias"  # prefix of its error after a text that no token can continue
# The default of 200,000 ends a text in the middle if its string has a pattern and a maxLength of 1,000. A row that
# reaches the limit takes 80 ms.
LIMITS = llguidance.LLParserLimits(step_lexer_fuel=1_200_000)
_LONGEST_S = 0.05  # of a new lexer in the engine loop, where other requests wait for it
_MAX_TEXTS = 16  # too complex texts that a grammar remembers
_LEXER_BYTES, _BYTES_PER_CHARACTER = 1 << 20, 50
_CONTROL = b"\xff"  # the first byte that llguidance gives for a control token


class LLGuidanceMatcher:
    """The state of one request's grammar. Not thread-safe.

    An llguidance matcher that reaches a limit stays in an error state. If the limit is one of the lexer, so do all
    matchers that share it. A text whose row uses up the lexer is too complex: with a new lexer it would be, too. Other
    errors may come from the text of another request. ``_replace_matcher`` therefore replaces a matcher in an error
    state and feeds the new one the same tokens. The request fails with BadRequest if its text is too complex, if the
    new matcher also fails, or if a new lexer takes so long that the engine loop cannot wait for it.

    ``accept`` decides by the precomputed rows if there are any. The llguidance matcher consumes these tokens later, in
    ``_feed``.

    An llguidance matcher keeps its last row, and keeps it in a rollback: after another text of the same length it may
    return that row (seen in 1.9.1). So a draft window is read by a copy, and ``rollback`` computes the row anew.
    """

    def __init__(
        self,
        grammar: "LLGuidanceGrammar",
        lexer: "Lexer",
        matcher: llguidance.LLMatcher,
        stop_ids: Set[int],
        text: Iterable[int] = (),
    ) -> None:
        self.stop_ids = stop_ids
        self._grammar = grammar
        self._lexer = lexer  # of `matcher`
        self._matcher = matcher
        self._text = list(text)
        self._fed = len(self._text)  # tokens that the llguidance matcher has consumed
        self._ended = False  # by one of `stop_ids`
        self._rows = np.empty((0, mask_words(grammar.end + 1)), np.int32)
        self._precomputed = _PrecomputedRows(0, [], self._rows)
        self._fast_forward = 0, b""  # cached: a number of tokens, and the bytes that must follow them

    def fill_row(self, row: np.ndarray) -> None:
        """See Grammar.fill_row.

        Raises InternalError for a buffer that is not int32[words], BadRequest if the text is too complex.
        """
        check_fillable(row, self._grammar.words, ended=self._ended)
        known, end = self._precomputed.row(self._text), self._grammar.end
        if known is None:
            known = self._computed()
        row[:] = known[: row.size]
        complete = bitmask.allows(known, end)
        if end < 32 * row.size:
            bitmask.forbid(row, end)
        for token in self.stop_ids:
            (bitmask.allow if complete else bitmask.forbid)(row, token)

    def precompute_rows(self, tokens: Sequence[int]) -> None:
        """See Grammar.precompute_rows. Stops at the first rejected token."""
        ours = list(takewhile(lambda token: 0 <= token < self._grammar.end and token not in self.stop_ids, tokens))
        if self._ended or not ours:
            return
        self._feed()
        if len(self._rows) <= len(ours):
            self._rows = np.empty((len(ours) + 1, self._rows.shape[1]), np.int32)
        rows = self._rows[: len(ours) + 1]
        rows[:, -1] = 0  # differs from the row that an error leaves
        ahead = self._matcher.deep_copy()
        too_complex = self._lexer.use(
            ahead, ahead.unsafe_compute_mask_ptr_with_draft_token, rows.ctypes.data, rows[0].nbytes, ours
        )
        if ahead.is_error():
            failed = self._failed_row(rows)
            if failed is not None and too_complex:
                self._grammar.remember_too_complex([*self._text, *ours[:failed]], reason(ahead))
            rows = rows[: failed or 0]
        known = min(1, len(rows))  # rows after a rejected token are not written
        while known < len(rows) and bitmask.allows(rows[known - 1], ours[known - 1]):
            known += 1
        self._precomputed = _PrecomputedRows(len(self._text), ours, rows[:known])

    def accept(self, token: int) -> bool:
        """See Grammar.accept.

        A token that makes the text too complex is accepted; the next row and the next token raise BadRequest.
        """
        if self._ended or not 0 <= token < self._grammar.end:
            return False
        known = self._precomputed.row(self._text)
        if token in self.stop_ids:
            self._ended = self._is_complete() if known is None else bitmask.allows(known, self._grammar.end)
            return self._ended
        if known is not None:
            taken = bitmask.allows(known, token)
        else:
            self._feed()
            self._require_simple()
            taken = bool(self._matcher.try_consume_tokens([token]))
            if not taken and not self._matcher.is_error() and self._row_allows(token):
                # Without the row, its lexer gives up silently at the limit that a row reports or does not reach.
                taken = bool(self._matcher.try_consume_tokens([token]))
            if self._matcher.is_error():
                self._replace_matcher()
                self._require_no_error()
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
            row = np.empty(self._rows.shape[1], np.int32)
            self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)  # replaces the row of the old text
        if len(self._text) < self._precomputed.begin:
            self._precomputed = _PrecomputedRows(0, [], self._rows[:0])
        if len(self._text) < self._fast_forward[0]:
            self._fast_forward = 0, b""

    def fork(self) -> "LLGuidanceMatcher":
        self._feed()
        copy = LLGuidanceMatcher(self._grammar, self._lexer, self._matcher.deep_copy(), self.stop_ids, self._text)
        copy._ended = self._ended
        return copy

    def is_terminated(self) -> bool:
        return self._ended

    def fast_forward_tokens(self) -> list[int]:
        """See Grammar.fast_forward_tokens. At most ``MAX_FAST_FORWARD_BYTES`` of text."""
        if self._ended:
            return []
        begin, text = self._fast_forward
        tokens = self._grammar.vocabulary.tokens
        since = b"".join(tokens[token] for token in self._text[begin:])
        if len(since) >= len(text) or not text.startswith(since):
            self._feed()
            since, (text, _, _) = b"", bytes(self._matcher.compute_ff_bytes()).partition(_CONTROL)
            self._fast_forward = len(self._text), text
        return self._grammar.vocabulary.tokenize(text[len(since) : len(since) + MAX_FAST_FORWARD_BYTES])

    def _computed(self) -> np.ndarray:
        """Compute the row after the text, including the bit of llguidance's own end of text."""
        self._feed()
        self._require_simple()
        row = np.empty(self._rows.shape[1], np.int32)
        too_complex = self._lexer.use(self._matcher, self._matcher.unsafe_compute_mask_ptr, row.ctypes.data, row.nbytes)
        if too_complex:
            self._grammar.remember_too_complex(self._text, reason(self._matcher))
            self._require_simple()
        if self._matcher.is_error():
            self._replace_matcher()
            self._lexer.use(self._matcher, self._matcher.unsafe_compute_mask_ptr, row.ctypes.data, row.nbytes)
            self._require_no_error()
        return row

    def _row_allows(self, token: int) -> bool:
        try:
            return bitmask.allows(self._computed(), token)
        except BadRequest:
            if self._matcher.get_error().startswith(NO_TOKEN):
                return False
            raise

    def _is_complete(self) -> bool:
        self._feed()
        return bool(self._matcher.is_accepting())

    def _feed(self) -> None:
        """Let the llguidance matcher consume the rest of the text; if it is too complex, the next row raises."""
        if self._matcher.is_error():  # from tokens that were rolled back
            self._replace_matcher()
        if self._fed == len(self._text):
            return
        self._lexer.use(self._matcher, self._matcher.consume_tokens, self._text[self._fed :])
        self._fed = len(self._text)
        if self._matcher.is_error():
            self._replace_matcher()

    def _failed_row(self, rows: np.ndarray) -> int | None:
        """Return the index in ``rows`` of the row whose error ended ``precompute_rows``; None if that is unknown."""
        written = np.flatnonzero(rows[:, -1])
        failed = len(written) and bitmask.only(rows[written[-1]]) == self._grammar.end
        return int(written[-1]) if failed else None

    def _replace_matcher(self) -> None:
        if self._grammar.too_complex(self._text) is not None:
            return
        self._lexer.note_error(self._matcher)
        lexer = self._grammar.usable_lexer()
        if lexer is None:
            return
        self._lexer, self._matcher = lexer, lexer.matcher()
        self._lexer.use(self._matcher, self._matcher.consume_tokens, self._text)
        self._fed = len(self._text)

    def _require_simple(self) -> None:
        if (reason := self._grammar.too_complex(self._text)) is not None:
            raise _too_complex(reason)

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            again = ", or send it again: texts of other requests count, too" if self._grammar.exhausted else ""
            raise _too_complex(reason(self._matcher), again)


class _PrecomputedRows(NamedTuple):
    """Precomputed rows: after the first ``begin`` tokens of a text, and after each of the ``tokens`` that follow."""

    begin: int
    tokens: list[int]
    rows: np.ndarray

    def row(self, text: list[int]) -> np.ndarray | None:
        """Return the row after ``text``, or None if it was not precomputed. ``begin`` tokens of it are unchanged."""
        at = len(text) - self.begin
        known = 0 <= at < len(self.rows) and text[self.begin :] == self.tokens[:at]
        return self.rows[at] if known else None


class Lexer:
    """The lexer that the llguidance matchers of a grammar share, and its limits. Thread-safe.

    ``exhausted``: a text has reached a limit. All its matchers are in an error state from then on.
    """

    def __init__(self, start: llguidance.LLMatcher) -> None:
        self.exhausted = False
        self._start = start
        self._lock = Lock()  # llguidance has one, too; this one tells whose text exhausts the lexer

    def matcher(self) -> llguidance.LLMatcher:
        """Return a matcher of an empty text."""
        return self._start.deep_copy()

    def use(self, matcher: llguidance.LLMatcher, operation: Callable[..., Any], *arguments: Any) -> bool:
        """Call an ``operation`` of ``matcher``. Return whether it used up the lexer, as it would a new one."""
        with self._lock:
            operation(*arguments)
            return matcher.is_error() and self._exhausts(matcher.get_error())

    def note_error(self, matcher: llguidance.LLMatcher) -> None:
        """Note whether the error of ``matcher`` is one of the lexer."""
        with self._lock:
            self._exhausts(matcher.get_error())

    def _exhausts(self, error: str) -> bool:
        before, self.exhausted = self.exhausted, self.exhausted or error.startswith(_LEXER)
        return self.exhausted and not before and _USED_UP in error


class LLGuidanceGrammar:
    """A compiled grammar. Requests and threads may share it."""

    def __init__(
        self, vocabulary: Vocabulary, tokenizer: llguidance.LLTokenizer, source: str, stop_ids: tuple[int, ...]
    ) -> None:
        self.vocabulary = vocabulary
        self.words = mask_words(len(vocabulary.tokens))
        self.end = len(vocabulary.tokens)  # id of llguidance's end of text; rows replace it by the `stop_ids`
        self.stop_ids = stop_ids
        self._tokenizer = tokenizer
        self._source = source
        self._lock = Lock()
        self._too_complex: dict[tuple[int, ...], str] = {}  # reasons by text
        begun = time.thread_time()
        first = self._compile()
        if not first.is_error():
            first.compute_bitmask()  # slow for the first row; copies share the result
        self._seconds = time.thread_time() - begun
        if first.is_error():
            raise ValueError(reason(first))
        self._lexer = Lexer(first)

    @property
    def size_bytes(self) -> int:
        """An estimate of the memory in bytes. The lexer grows with the texts that it reads, up to its limit."""
        return _LEXER_BYTES + _BYTES_PER_CHARACTER * len(self._source)

    @property
    def exhausted(self) -> bool:
        """Whether its lexer is at a limit and takes too long to replace in the engine loop.

        It must be compiled again for further requests.
        """
        return self._lexer.exhausted and self._seconds > _LONGEST_S

    def matcher(self, stop_ids: Iterable[int] | None = None) -> LLGuidanceMatcher:
        """Return a matcher of a new text. ``stop_ids`` end a complete text; None: those of the compiler."""
        stops, lexer = frozenset(self.stop_ids if stop_ids is None else stop_ids), self._lexer
        return LLGuidanceMatcher(self, lexer, lexer.matcher(), stops)

    def usable_lexer(self) -> Lexer | None:
        """Return the lexer, or a new one if it is exhausted; None if that takes too long for the engine loop."""
        with self._lock:
            if self.exhausted:
                return None
            if self._lexer.exhausted:
                self._lexer = Lexer(self._compile())
            return self._lexer

    def remember_too_complex(self, text: Iterable[int], reason: str) -> None:
        """Note that the row after ``text`` uses up the lexer."""
        with self._lock:
            if len(self._too_complex) == _MAX_TEXTS:
                del self._too_complex[next(iter(self._too_complex))]
            self._too_complex[tuple(text)] = reason

    def too_complex(self, text: Sequence[int]) -> str | None:
        """Return why the row after ``text`` must not be computed, or None."""
        return self._too_complex.get(tuple(text)) if self._too_complex else None

    def _compile(self) -> llguidance.LLMatcher:
        return llguidance.LLMatcher(self._tokenizer, self._source, log_level=SILENT, limits=LIMITS)


def _too_complex(reason: str, again: str = "") -> BadRequest:
    rule = f"structured_outputs: the text so far makes the grammar too complex: {reason}"
    return BadRequest(f"{rule}; simplify the schema or the expression{again}")


def reason(matcher: llguidance.LLMatcher) -> str:
    lines = matcher.get_error().split("\n\n<state>")[0].strip().split("\n")
    return clipped(lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1].strip()}")

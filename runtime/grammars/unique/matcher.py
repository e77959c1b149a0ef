"""A matcher for schemas with ``uniqueItems``: the rows of another matcher, without tokens that would repeat an item."""

from collections.abc import Iterable, Sequence, Set

import numpy as np

from tandemrt.engines.contract.masks import mask_words
from tandemrt.runtime.grammars import bitmask
from tandemrt.runtime.grammars.grammar import Grammar
from tandemrt.runtime.grammars.llguidance_matcher import LLGuidanceGrammar
from tandemrt.runtime.grammars.unique.equality import distinct_beginning, may_stay
from tandemrt.runtime.grammars.unique.places import Freedom
from tandemrt.runtime.grammars.unique.reader import (
    AFTER,
    COLON,
    NAME_START,
    NUMBER,
    STRING,
    VALUE,
    State,
    TextReader,
    expected,
)  # fmt: skip
from tandemrt.runtime.grammars.unique.token_index import Crossing, Sorted, TokenIndex, allowed, first_allowed, forbid

_BETWEEN = frozenset({VALUE, AFTER, NAME_START, COLON})  # modes in which white space changes nothing
MOST_ROWS_AHEAD = 200  # for one row; beyond them a text is taken to have a continuation
_FIRST_TOKENS = 16


class UniqueItemsMatcher:
    """The state of one text. Not thread-safe.

    A token is rejected if an item would equal an earlier item of its array, and if all continuations would. A name
    that an item, or an object in it, would repeat is rejected, too.
    """

    def __init__(self, inner: Grammar, reader: TextReader, index: TokenIndex, states: Sequence[State]) -> None:
        self._inner = inner
        self._reader = reader
        self._index = index
        self._states = list(states)  # before the first token, and after each
        self._row: np.ndarray | None = None  # the row of the next token, if it is known

    @property
    def stop_ids(self) -> Set[int]:
        return self._inner.stop_ids

    def fill_row(self, row: np.ndarray) -> None:
        """See Grammar.fill_row. Raises what the other matcher raises."""
        self._inner.fill_row(row)
        ahead = _Lookahead()
        for token, after in self._restrict(self._states[-1], row):
            if _may_be_stuck(after) and not self._goes_on_after(token, after, ahead):
                bitmask.forbid(row, token)
        self._row = row.copy()

    def precompute_rows(self, tokens: Sequence[int]) -> None:
        """See Grammar.precompute_rows."""
        self._inner.precompute_rows(tokens)

    def accept(self, token: int) -> bool:
        """See Grammar.accept."""
        if not self._inner.accept(token):
            return False
        if token not in self.stop_ids:
            state = self._states[-1]
            after = self._after(state, token)
            if after is None or (after is not state and _may_be_stuck(after) and not self._was_in_row(token)):
                self._inner.rollback(1)
                return False
            self._states.append(after)
        self._row = None
        return True

    def _after(self, state: State, token: int) -> State | None:
        text = self._index.tokens[token]
        return self._reader.read(state, text) if text else self._reader.control(state, token)

    def _was_in_row(self, token: int) -> bool:
        """Return whether the row before ``token``, which the other matcher has read, allows it.

        A lookahead for this token alone may see farther than the row.
        """
        if self._row is None:
            self._inner.rollback(1)
            self.fill_row(np.empty(mask_words(len(self._index.tokens)), np.int32))
            self._inner.accept(token)
        assert self._row is not None
        return bitmask.allows(self._row, token)

    def rollback(self, count: int) -> None:
        """See Grammar.rollback."""
        texts = count - (count > 0 and self.is_terminated())
        self._inner.rollback(count)
        del self._states[len(self._states) - texts :]
        if count:
            self._row = None

    def fork(self) -> "UniqueItemsMatcher":
        copied = UniqueItemsMatcher(self._inner.fork(), self._reader, self._index, self._states)
        copied._row = self._row
        return copied

    def is_terminated(self) -> bool:
        return self._inner.is_terminated()

    def fast_forward_tokens(self) -> list[int]:
        """See Grammar.fast_forward_tokens."""
        return self._inner.fast_forward_tokens()

    def _restrict(self, state: State, row: np.ndarray) -> list[tuple[int, State]]:
        """Forbid the tokens that repeat an item, and return the allowed ones after which an item may be repeated."""
        level, index = state.level, self._index
        kept = level is not None and level.kept
        continuations = [_within(index.crossing, state) if kept else self._reader.opening(state, index)]
        if level is not None and level.freedom == Freedom.UNKNOWN:
            continuations.append(_within(index.comma, state))
        unfinished: list[tuple[int, State]] = []
        for tokens in continuations:
            for token in allowed(tokens, row):
                after = self._after(state, token)
                if after is None:
                    bitmask.forbid(row, token)
                elif after.may_repeat:
                    unfinished.append((token, after))
        if state.may_repeat:
            between = state.mode in _BETWEEN
            unfinished += self._explore(state, index.all, row, skip=b" \t\n\r" if between else b"")
            if between:
                unfinished += self._explore(state, index.after_space, row)
        return [(token, after) for token, after in unfinished if bitmask.allows(row, token)]

    def _explore(self, state: State, tokens: Sorted, row: np.ndarray, skip: bytes = b"") -> list[tuple[int, State]]:
        """Follow the beginnings of ``tokens`` after which an item may still be repeated; see ``_restrict``.

        ``skip``: bytes that no token of interest begins with.
        """
        unfinished: list[tuple[int, State]] = []
        pending = [(state, b"", 0, len(tokens.texts))]
        while pending:
            state, text, begin, end = pending.pop()
            while text and begin < end and len(tokens.texts[begin]) == len(text):
                unfinished.append((int(tokens.ids[begin]), state))
                begin += 1
            for byte in set(expected(state)).difference(b"" if text else skip):
                more = text + bytes([byte])
                low, high = tokens.narrowed(more, begin, end)
                if low == high:
                    continue
                after = self._reader.step(state, byte)
                if after is None:
                    forbid(tokens.ids[low:high], row)
                elif after.may_repeat:
                    pending.append((after, more, low, high))
        return unfinished

    def _goes_on_after(self, token: int, after: State, ahead: "_Lookahead") -> bool:
        """Return ``_goes_on`` after one more token."""
        key = _key(after)
        if key in ahead.seen:
            return key in ahead.going_on
        if not self._inner.accept(token):
            return True
        goes_on = self._goes_on(after, ahead)
        self._inner.rollback(1)
        return goes_on

    def _goes_on(self, state: State, ahead: "_Lookahead", *, spaced: bool = False) -> bool:
        """Return whether a text, which the other matcher has read, has a continuation that repeats no item.

        ``spaced``: the text ends with white space, so that more of it is not needed.
        """
        ahead.rows += 1
        if ahead.rows > MOST_ROWS_AHEAD:
            return True
        key = _key(state)
        row = np.empty(mask_words(len(self._index.tokens)), np.int32)
        self._inner.fill_row(row)
        ahead.seen.add(key)
        if self._has_new_item(state, row):
            ahead.going_on.add(key)
            return True
        unfinished = self._restrict(state, row)
        forbid(np.array([token for token, _ in unfinished], np.int32), row)
        spaces = list(allowed(self._index.spaces, row)) if state.mode in _BETWEEN else []
        forbid(np.array(spaces, np.int32), row)
        goes_on = bool(row.any())
        for token, after in () if goes_on else unfinished:
            goes_on = not _may_be_stuck(after) or self._goes_on_after(token, after, ahead)
            if goes_on:
                break
        if not goes_on and spaces and not spaced:
            self._inner.accept(spaces[0])
            goes_on = self._goes_on(state, ahead, spaced=True)
            self._inner.rollback(1)
        if goes_on:
            ahead.going_on.add(key)
        return goes_on

    def _has_new_item(self, state: State, row: np.ndarray) -> bool:
        """Return whether one of the first tokens of a row makes an item that differs from all others."""
        stops, tokens = self.stop_ids, self._index.tokens
        for token in first_allowed(row, _FIRST_TOKENS):
            if token in stops:
                return True
            if tokens[token].isspace():
                continue
            after = self._after(state, token)
            if after is not None and not after.may_repeat:
                return True
        return False


class _Lookahead:
    """What was found about the texts after one text.

    Attributes:
        rows: the number of rows that were looked at.
        seen: keys of states that were looked at.
        going_on: keys of those with a continuation.
    """

    def __init__(self) -> None:
        self.rows = 0
        self.seen: set[object] = set()
        self.going_on: set[object] = set()


class UniqueItemsGrammar:
    """A compiled grammar of a schema with ``uniqueItems``. Requests and threads may share it.

    Args:
        inner: the grammar of the schema, or of the structural tag, without the keyword.
        reader: reads a text of it with the keyword.
        index: the tokens of the vocabulary.
    """

    def __init__(self, inner: LLGuidanceGrammar, reader: TextReader, index: TokenIndex) -> None:
        self._inner = inner
        self._reader = reader
        self._index = index

    @property
    def size_bytes(self) -> int:
        """An estimate of the memory in bytes."""
        return 2 * self._inner.size_bytes

    @property
    def exhausted(self) -> bool:
        """Whether further requests must compile it again."""
        return self._inner.exhausted

    def matcher(self, stop_ids: Iterable[int] | None = None) -> UniqueItemsMatcher:
        """Return a matcher of a new text. ``stop_ids`` end a complete text; None: those of the compiler."""
        return UniqueItemsMatcher(self._inner.matcher(stop_ids), self._reader, self._index, [self._reader.start])


def _within(tokens: Crossing, state: State) -> np.ndarray:
    return tokens.in_string if state.in_string else tokens.elsewhere


def _may_be_stuck(state: State) -> bool:
    """Return whether all continuations may repeat an item, judged without the other matcher."""
    if state.level is None or not state.may_repeat:
        return False
    freedom = state.level.freedom
    if state.mode == NUMBER and not any(may_stay(state.text, value) for _, value in state.rivals):
        return False
    if freedom == Freedom.UNLESS_COMPLETE:
        return state.mode == STRING and not state.pending and any(text == state.text for _, text in state.rivals)
    return freedom == Freedom.UNKNOWN


def _key(state: State) -> object:
    """Return a value that differs between states with different unfinished values."""
    level = state.level
    place = None if level is None else (level.depth, level.size, level.name, tuple(key for key, _ in level.rivals))
    text = distinct_beginning(state.text) if state.mode == NUMBER else state.text
    return state.part, state.mode, place, text, state.pending, tuple(key for key, _ in state.rivals)

"""Mask rows: the tokens that may follow a state, one bit per token, and the pinned memory of a step's rows."""

from contextlib import nullcontext

import numpy as np
import numpy.typing as npt

from tandemrt.runtime.constraints.grammar_feed import GrammarFeed
from tandemrt.runtime.constraints.rules import ConstraintRules
from tandemrt.runtime.constraints.transitions import ConstraintState, Phase, Transitions
from tandemrt.runtime.grammars import bitmask
from tandemrt.runtime.grammars.bitmask import FixedRow
from tandemrt.runtime.grammars.grammar import temporarily_accepted

NO_TOKENS = np.zeros(1, np.int32)  # broadcast to a row that allows no token


class Rows:
    """Compute the mask rows of one request. ``feed`` is None without a grammar."""

    def __init__(self, rules: ConstraintRules, feed: GrammarFeed | None, transitions: Transitions) -> None:
        self._rules = rules
        self._feed = feed
        self._transitions = transitions

    def shared(self, state: ConstraintState) -> FixedRow | None:
        """Return the row of ``state`` if it is immutable and shared by many states, otherwise None."""
        return self._without_grammar(state) if self._rules.bad_words is None else None

    def write(self, state: ConstraintState, row: np.ndarray) -> None:
        """Write the tokens that may follow ``state``, which is not finished, into an int32[words] row."""
        words = self._rules.bad_words
        if (fixed := self._without_grammar(state)) is not None:
            row[:] = fixed.words
        elif state.phase is Phase.FORCING:
            bitmask.allow_only(row, self._rules.forced_end[state.forced])
        else:
            assert self._feed is not None
            self._write_grammar_row(self._feed, state, row)
        if words is not None and not state.is_forced:
            row &= words.allowed(state.bad_word)

    def _without_grammar(self, state: ConstraintState) -> FixedRow | None:
        """Return the row of a state that depends on no grammar, otherwise None. Bad words are not masked out."""
        if state.phase is Phase.THINKING:
            return self._thinking_row(state)
        if self._feed is None and state.phase in (Phase.OPEN, Phase.ANSWER):
            return self._rules.answer_base(state.length)
        return None

    def _thinking_row(self, state: ConstraintState) -> FixedRow:
        """Return the row of a THINKING state.

        It masks out stop tokens, and tokens that end the reasoning and continue with text that the grammar rejects.
        """
        rules = self._rules
        if self._feed is None or rules.matcher is None:
            return rules.base_without_stops
        key = state.node, state.in_prompt
        if key not in rules.thinking_rows:
            alike = ConstraintState(Phase.THINKING, node=state.node, in_prompt=state.in_prompt)
            closing = rules.matcher.closing(state.node)
            rejected = [token for token in closing if not self._transitions.can_continue_reasoning(alike, token)]
            rules.thinking_rows[key] = FixedRow(bitmask.without(rules.base_without_stops.words, rejected))
        return rules.thinking_rows[key]

    def _write_grammar_row(self, feed: GrammarFeed, state: ConstraintState, row: np.ndarray) -> None:
        rules, grammar = self._rules, feed.grammar
        if state.delimiter_only:
            row.fill(0)
        else:
            with temporarily_accepted(grammar, state.pending) if state.pending else nullcontext():
                if grammar.is_terminated():
                    row.fill(0)
                else:
                    grammar.fill_row(row)
            row &= rules.answer_base(state.length).words
        if state.phase is not Phase.OPEN or not rules.may_think or rules.matcher is None:
            return
        for token in rules.matcher.opening(state.node, self._transitions.pending_symbols(state)):
            if (opening := self._transitions.opening(state, token)) is None:
                continue
            if opening[1] is None or self._transitions.can_open(state, token, opening[1]):
                bitmask.allow(row, token)


class MaskRows:
    """Mask rows of a step in pinned memory, int32 [rows, words], and a record of their contents.

    A row that already holds its value is neither written nor copied again, because most rows repeat from step to step:
    a request without a grammar has one row for all its tokens. Copy the rows from ``first_changed`` to ``changed_end``
    to the device, then call ``mark_clean``. Threads may write different rows concurrently.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self._contents: list[np.ndarray | None] = [None] * len(rows)  # the shared row that each row is a copy of
        self._ids = np.zeros(len(rows), np.int64)  # of these
        self._only: dict[int, int] = {}  # by row that allows one token (allow_only): the token
        self._without: dict[int, tuple[np.ndarray, int]] = {}  # by row that is one less a token (write_without): both
        self._written = bytearray(len(rows))  # 1 for a row that was written since `mark_clean`

    def write_shared(self, index: int, row: np.ndarray, count: int = 1) -> None:
        """Write ``row`` to the ``count`` rows from ``index`` on. The caller must not change ``row`` any more."""
        for at in range(index, index + count):
            if self._contents[at] is not row:
                before, token = self._without.get(at, (None, 0))
                if before is row:
                    self._write(at)[token >> 5] = row[token >> 5]
                else:
                    self._write(at)[:] = row
                self._holds(at, row)

    def allow_only(self, index: int, token: int) -> None:
        """Let row ``index`` allow only ``token``."""
        before, row = self._only.get(index), self._write(index)
        if before is None:
            bitmask.allow_only(row, token)
        else:
            row[before >> 5] = 0
            bitmask.allow(row, token)
        self._holds(index, None)
        self._only[index] = token

    def write_without(self, index: int, row: np.ndarray, token: int) -> None:
        """Write ``row`` without ``token`` to row ``index``. The caller must not change ``row`` any more."""
        self.write_shared(index, row)
        bitmask.forbid(self._write(index), token)
        self._holds(index, None)
        self._without[index] = row, token

    def forbid(self, index: int, token: int) -> None:
        """Forbid ``token`` in row ``index``, unless the row allows no other token."""
        row = self.writable(index)
        bitmask.forbid(row, token)
        if not row.any():
            bitmask.allow(row, token)

    def others_than(self, rows: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.intp]:
        """Return which groups of ``count`` rows are no copies of a shared row; ``rows``: its ``id``, for each group."""
        ids = self._ids[: len(rows) * count].reshape(len(rows), count)
        return np.flatnonzero((ids != rows[:, None]).any(axis=1))

    def writable(self, index: int) -> np.ndarray:
        """Return row ``index`` as a view for the caller to write."""
        self._holds(index, None)
        return self._write(index)

    def count_allowed(self, index: int) -> int:
        """Return the number of tokens that row ``index`` allows."""
        return int.from_bytes(self._rows[index].tobytes(), "little").bit_count()

    @property
    def first_changed(self) -> int:
        """The index of the first row written since ``mark_clean``, or the number of rows if none was."""
        first_written = self._written.find(1)
        return len(self._written) if first_written < 0 else first_written

    @property
    def changed_end(self) -> int:
        """The index after the last row written since ``mark_clean``, or 0 if none was."""
        return self._written.rfind(1) + 1

    def mark_clean(self) -> None:
        """Record that all written rows were copied to the device."""
        self._written = bytearray(len(self._rows))

    def _holds(self, index: int, row: np.ndarray | None) -> None:
        """Record that row ``index`` is a copy of the shared ``row``, or of none."""
        self._contents[index], self._ids[index] = row, 0 if row is None else id(row)
        self._only.pop(index, None)
        self._without.pop(index, None)

    def _write(self, index: int) -> np.ndarray:
        self._written[index] = 1
        row: np.ndarray = self._rows[index]
        return row

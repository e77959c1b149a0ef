"""Lookahead over drafted tokens: runs that are taken at once, and fast-forward tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.constraints.delimiters import ROOT
from tandemrt.runtime.constraints.grammar_feed import GrammarFeed
from tandemrt.runtime.constraints.rules import ConstraintRules
from tandemrt.runtime.constraints.transitions import ConstraintState, Phase

_ENDLESS = 1 << 40  # tokens


class Run(NamedTuple):
    """Leading tokens of a draft that only lengthen the text: they begin no delimiter, and no end or limit applies.

    Attributes:
        length: the number of these tokens.
        next_row_filled: whether the row after the run is written too. It is if the grammar rejected the next token.
    """

    length: int
    next_row_filled: bool = False


class Lookahead:
    """Find runs and fast-forward tokens of one request. ``feed`` is None without a grammar."""

    def __init__(self, rules: ConstraintRules, feed: GrammarFeed | None) -> None:
        self._rules = rules
        self._feed = feed

    def ordinary_run(self, state: ConstraintState, tokens: Sequence[int]) -> int:
        """Return the length of the run at the start of ``tokens``, for a ``state`` with a shared row (``Rows.shared``).

        That row is the mask row of every token of the run. No token of the run begins a delimiter or ends the text.
        After the run the budget is not spent and the maximum length is not reached. The grammar is not fed.
        ``after_run`` returns the state after the run.
        """
        if state.node != ROOT:
            return 0
        limit = min(len(tokens), self.room(state))
        for count in range(limit):
            if tokens[count] not in self._rules.ordinary:
                return count
        return limit

    def grammar_run(
        self, state: ConstraintState, tokens: Sequence[int], row_at: Callable[[int], np.ndarray] | None = None
    ) -> Run:
        """Feed the grammar of an answer the run at the start of ``tokens``.

        The run ends before the first token that its row rejects, that may end the text, or after which the minimum or
        maximum length applies. ``after_run`` returns the state after the run.

        ``row_at`` returns the int32[words] row to write for an index in ``tokens``. If it is given, the row of every
        token of the run is written, and the row of the rejected token.
        """
        if self._feed is None or state.phase is not Phase.ANSWER:
            return Run(0)
        grammar, stops = self._feed.grammar, self._rules.grammar_stops
        limit, base, count = min(len(tokens), self.room(state)), self._rules.answer_base(state.length), 0
        try:
            while count < limit:
                if row_at is not None:
                    row = row_at(count)
                    grammar.fill_row(row)
                    row &= base.words
                token = tokens[count]
                if token in stops or not base.allows(token) or not grammar.accept(token):
                    return Run(count, row_at is not None)
                count += 1
        except BadRequest:  # the text is too complex; the caller continues token by token and gets the same error
            pass
        finally:
            self._feed.count(count)
        return Run(count)

    def after_run(self, state: ConstraintState, count: int) -> ConstraintState:
        """Return the state after a run of ``count`` tokens, at least one."""
        if state.phase is Phase.THINKING:
            return state._replace(length=state.length + count, spent=state.spent + count, tail=())
        return state._replace(length=state.length + count)

    def precompute_rows(self, state: ConstraintState, tokens: Sequence[int]) -> None:
        """Let the grammar compute, in one call, the row of ``state`` and the rows after each of ``tokens``."""
        if self._feed is not None and tokens and state.phase is Phase.ANSWER:
            self._feed.grammar.precompute_rows(tokens)

    def fast_forward_tokens(self, state: ConstraintState) -> list[int]:
        """Return tokens of the text that must follow ``state``, or an empty list if there is a choice.

        Other tokens may detokenize to the same text, so the result is a draft and does not bound the mask row.
        """
        rules = self._rules
        if state.phase is Phase.FORCING:
            return list(rules.forced_end[state.forced :])
        if state.delimiter_only:
            assert rules.thinking is not None
            return (
                rules.thinking.vocabulary.tokenize_symbols(rules.think_start[rules.nodes[state.node].open_prefix :])
                or []
            )
        answers = state.phase is Phase.ANSWER or (state.phase is Phase.OPEN and not rules.may_think)
        return self._feed.grammar.fast_forward_tokens() if self._feed and answers else []

    def may_fast_forward(self, state: ConstraintState, tokens: int) -> bool:
        """Return whether ``fast_forward_tokens`` may return any after ``tokens`` more tokens.

        The end of a reasoning block within these tokens is not predicted, except by the budget.
        """
        if state.phase is Phase.THINKING:
            return self._rules.budget is not None and self._rules.budget - state.spent <= tokens
        return state.phase is Phase.FORCING or (self._feed is not None and state.phase is not Phase.DONE)

    def room(self, state: ConstraintState) -> int:
        """Return how many tokens may follow before the minimum, the maximum or the budget applies."""
        rules = self._rules
        limit = _ENDLESS if rules.max_tokens is None else rules.max_tokens - state.length - 1
        if state.phase is Phase.THINKING:
            return limit if rules.budget is None else min(limit, rules.budget - state.spent - 1)
        return min(limit, rules.min_tokens - state.length) if state.length < rules.min_tokens else limit

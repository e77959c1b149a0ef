"""The constraint of one request: mask rows for verification, and a state that advances with the emitted tokens.

It combines the thinking budget, grammar, stop tokens, minimum and maximum length, banned and allowed tokens and bad
words (docs/design.md#constraints has the rules). ``fill_rows`` writes the rows of a draft window. ``commit`` advances
by the tokens that verification emitted.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.validation.errors import BadRequest, InternalError
from tandemrt.runtime.constraints.bad_words import BadWords
from tandemrt.runtime.constraints.delimiters import ROOT
from tandemrt.runtime.constraints.grammar_feed import GrammarFeed
from tandemrt.runtime.constraints.lookahead import Lookahead, Run
from tandemrt.runtime.constraints.ordinary import OrdinaryTokens
from tandemrt.runtime.constraints.roles import RoleSpan, RoleTracker, UndecidedToken
from tandemrt.runtime.constraints.rows import NO_TOKENS, MaskRows, Rows
from tandemrt.runtime.constraints.rules import ConstraintRules
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tandemrt.runtime.constraints.transitions import ConstraintState, Phase, Role, TokenRejected, Transitions
from tandemrt.runtime.grammars.bitmask import FixedRow
from tandemrt.runtime.grammars.grammar import Grammar

_NO_RUN = Run(0)


class FilledRows(NamedTuple):
    """The tokens of a draft window to verify.

    Attributes:
        tokens: drafted and fast-forward tokens, up to the first one that its own row rejects or that ends the request.
        fast_forward: indices in ``tokens`` of the fast-forward tokens, which the constraint and not the draft chose.
    """

    tokens: list[int]
    fast_forward: list[int]


@dataclass(frozen=True)
class Commit:
    """The result of committing emitted tokens.

    Attributes:
        kept: the tokens that become text, up to and including the first one that ends the request.
        finish: the finish reason: ``stop``, ``length``, ``constraint`` (no token at all may follow), or None.
        stop_token: the stop token that ended the request; it is in ``kept`` and in no span.
        spans: tokens whose role became certain, in order. Tokens that may yet become part of a delimiter are in a later
            commit. The commit that finishes the request contains all remaining tokens.
    """

    kept: list[int]
    finish: str | None = None
    stop_token: int | None = None
    spans: list[RoleSpan] = field(default_factory=list)


class SteadyText(NamedTuple):
    """A text that its next tokens only lengthen, as long as they are ordinary (see Run).

    Attributes:
        row: the mask row of these tokens.
        ordinary: the tokens that only lengthen it.
        room: how many may follow until a limit applies. The token after them may have another row.
    """

    row: npt.NDArray[np.int32]
    ordinary: OrdinaryTokens
    room: int


class Constraint:
    """The constraint of one request.

    Args:
        vocab_size: width of the model's logits.
        stop_ids: tokens that end the answer.
        prompt: token ids; the last delimiter in it decides the first phase.
        thinking: the rule of reasoning blocks, or None.
        grammar: a fresh grammar for the answer; this object owns it from now on.
        min_tokens: stop tokens are masked out until this many tokens are emitted.
        max_tokens: the request ends with ``length`` after this many tokens.
        bad_words: texts that neither reasoning nor answer may contain, or None. A word that begins in the prompt does
            not count.
        banned, allowed: token ids. Neither affects a forced end, which is always emitted completely.
        valid_tokens: ids from here on are padding of the logits and always masked out; None: there is no padding.

    With a thinking rule, a grammar and no delimiter in the prompt (phase OPEN), the answer may begin with the start
    delimiter or with what the grammar allows. After a token that fits only the delimiter, the rest of it must follow.

    Raises:
        BadRequest: an id or a length out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        stop_ids: Iterable[int],
        *,
        prompt: Sequence[int] = (),
        thinking: ThinkingRule | None = None,
        grammar: Grammar | None = None,
        min_tokens: int = 0,
        max_tokens: int | None = None,
        banned: Iterable[int] = (),
        allowed: Iterable[int] | None = None,
        valid_tokens: int | None = None,
        bad_words: BadWords | None = None,
    ) -> None:
        self._words = mask_words(vocab_size)
        self._rules = ConstraintRules(
            vocab_size,
            stop_ids,
            thinking=thinking,
            grammar=grammar,
            min_tokens=min_tokens,
            max_tokens=max_tokens,
            banned=banned,
            allowed=allowed,
            valid_tokens=valid_tokens,
            bad_words=bad_words,
        )
        self._use(None if grammar is None else GrammarFeed(grammar))
        self._state = self._transitions.start(prompt)
        self._undecided: tuple[UndecidedToken, ...] = ()
        self._empty_after: tuple[int, ...] | None = None  # tokens before the empty row that the last `fill_rows` found

    @property
    def phase(self) -> Phase:
        return self._state.phase

    @property
    def default_role(self) -> Role:
        """The role of the next token, unless it becomes part of a delimiter."""
        return self._state.default_role

    @property
    def finished(self) -> bool:
        return self._state.finish is not None

    @property
    def has_grammar(self) -> bool:
        return self._feed is not None

    @property
    def reasoning_tokens(self) -> int:
        """The number of reasoning tokens in the current or last block, including those of the prompt."""
        return self._state.spent

    @property
    def forced_ends(self) -> int:
        """How many reasoning blocks the budget ended."""
        return len(self._state.forced_ends)

    def forced_ends_within(self, length: int) -> int:
        """Return how many forced ends begin in the first ``length`` tokens. A stop string may cut off later ones."""
        return sum(start < length for start in self._state.forced_ends)

    @property
    def forced_end_spans(self) -> list[range]:
        """The emitted positions of each forced end."""
        size = len(self._rules.forced_end)
        return [range(start, min(start + size, self._state.length)) for start in self._state.forced_ends]

    @property
    def undecided_span(self) -> RoleSpan:
        """The emitted tokens that may yet become part of a delimiter, with the role that they get if they do not."""
        tracker = RoleTracker(self._rules, self._undecided)
        tracker.flush(self._state)
        return tracker.spans[0] if tracker.spans else RoleSpan(self._state.default_role, ())

    @property
    def allows_nothing(self) -> bool:
        """Whether no token at all may follow; ``commit([])`` ends the request then."""
        row = np.empty(self._words, np.int32)
        self._rows.write(self._state, row)
        return not row.any()

    def may_fast_forward(self, tokens: int) -> bool:
        """Return whether ``fast_forward_tokens`` may return any after ``tokens`` more tokens are committed."""
        return self._lookahead.may_fast_forward(self._state, tokens)

    def fast_forward_tokens(self, limit: int) -> list[int]:
        """Return up to ``limit`` tokens of the text that must follow the committed one. Does not change the state.

        The grammar, a start delimiter or a forced end determines this text. The list ends where there is a choice.
        Other tokens may detokenize to the same text, so these tokens are drafted and verified like any others.
        """
        forced: list[int] = []
        state = self._state
        try:
            while len(forced) < limit and (tokens := self._lookahead.fast_forward_tokens(state)):
                for token in tokens[: limit - len(forced)]:
                    state, _ = self._transitions.step(state, token)
                    forced.append(token)
        except Exception:
            pass  # a banned token or a text that is too complex; `fill_rows` raises the error for this request alone
        finally:
            self._undo()
        return forced

    def fill_rows(
        self, draft: Sequence[int], masks: MaskRows, first: int, *, limit: int = 0, override: bool = False
    ) -> FilledRows:
        """Write the mask rows of a draft window. Does not change the state.

        Args:
            draft: drafted tokens.
            masks, first: row ``first + i`` of ``masks`` becomes the row after the committed tokens and the first i
                tokens of the window. Rows after a rejected token or the end of the request are never read or written.
            limit: fast-forward tokens are added up to this window length. A fast-forward token replaces a missing
                drafted token, or one that its row rejects. The drafted tokens after it are dropped then.
            override: a fast-forward token also replaces a different drafted token that its row allows. Then only the
                tokens before a position decide whether it is drafted, as the rejection rule needs.

        If the text after a token is too complex for its grammar, that token is the last one of the window, and the row
        after it allows no token.

        Raises:
            BadRequest: the committed text is too complex for its grammar.
        """
        self._empty_after = None
        state, window = self._state, FilledRows([], [])
        drafted, follows = list(map(int, draft)), list[int]()
        self._lookahead.precompute_rows(state, drafted)
        try:
            run, row_filled = self._fill_run(drafted, masks, first, override)
            if run:
                window.tokens.extend(drafted[:run])
                state = self._lookahead.after_run(state, run)
            while state.phase is not Phase.DONE:
                at = len(window.tokens)
                if row_filled:
                    row, row_filled = FixedRow(masks.writable(first + at)), False
                else:
                    row = self._write_row(state, masks, first + at)
                token = drafted[at] if at < len(drafted) else None
                rejected = token is None or not row.allows(token)
                if at < limit and (rejected or override):
                    follows = follows or self._lookahead.fast_forward_tokens(state) or _single(row)
                    if follows and row.allows(follows[0]):
                        if token != follows[0]:
                            token, drafted = follows[0], drafted[:at]
                        window.fast_forward.append(at)
                        rejected = False
                if token is None or rejected:
                    if row.empty:
                        self._empty_after = tuple(window.tokens)
                    break
                follows = follows[1:] if follows[:1] == [token] else []
                window.tokens.append(token)
                state, _ = self._transitions.step(state, token)
        except BadRequest:  # the text is too complex for its grammar
            if not window.tokens:
                raise
            # Verification may not accept the last token. If it does, the next fill raises the error for the request.
            masks.write_shared(first + len(window.tokens), NO_TOKENS)
        finally:
            self._undo()
        return window

    def commit(self, tokens: Sequence[int]) -> Commit:
        """Advance by emitted tokens. Drop those after the token that ends the request.

        If no token may follow the state, an empty list ends the request with the finish reason ``constraint``.

        Raises:
            InternalError: a token is masked out by its own row. The state is unchanged then.
        """
        emitted = list(map(int, tokens))
        if (run := self._commit_run(emitted)) is not None:
            return run
        self._undo()
        state, tracker = self._state, RoleTracker(self._rules, self._undecided)
        kept: list[int] = []
        for token in emitted:
            if state.finish:
                break
            try:
                after, updates = self._transitions.step(state, token)
            except TokenRejected:
                self._undo()
                raise InternalError(
                    f"tokens: a mask row must allow every committed token; token {token} at index {len(kept)} is "
                    f"forbidden in phase {state.phase.value}. Verification must apply the rows that fill_rows wrote"
                ) from None
            tracker.add(token, after, updates)
            kept.append(token)
            state = after
        self._keep()
        if state.finish is None and self._is_empty_after(kept):
            tracker.flush(state)
            state = state._replace(phase=Phase.DONE, finish="constraint")
        self._state, self._undecided, self._empty_after = state, tuple(tracker.undecided), None
        return Commit(kept, state.finish, state.stop_token, tracker.spans)

    def steady_text(self) -> SteadyText | None:
        """Return what the next tokens have in common if they may only lengthen the text, otherwise None."""
        state, row = self._state, self._rows.shared(self._state)
        if not self._can_run or row is None or row.only is not None or row.empty or state.node != ROOT:
            return None
        return SteadyText(row.words, self._rules.ordinary, self._lookahead.room(state))

    def lengthen(self, count: int) -> None:
        """Commit ``count`` tokens, at least one, of which the caller knows that they lengthen a SteadyText."""
        self._state, self._empty_after = self._lookahead.after_run(self._state, count), None

    def fork(self) -> "Constraint":
        """Return an independent constraint in the same state."""
        copy = object.__new__(Constraint)
        copy.__dict__.update(self.__dict__)
        copy._use(None if self._feed is None else self._feed.fork())
        return copy

    def _use(self, feed: GrammarFeed | None) -> None:
        self._feed = feed
        self._transitions = Transitions(self._rules, feed)
        self._rows = Rows(self._rules, feed, self._transitions)
        self._lookahead = Lookahead(self._rules, feed)

    def _keep(self) -> None:
        if self._feed is not None:
            self._feed.keep()

    def _undo(self) -> None:
        if self._feed is not None:
            self._feed.undo()

    def _fill_run(self, draft: Sequence[int], masks: MaskRows, first: int, override: bool) -> Run:
        """Write the rows of the run at the start of the draft (see Run) and feed it to the grammar.

        The run is empty if a fast-forward token may replace a drafted token that its row allows.
        """
        if not self._can_run:
            return _NO_RUN
        shared = self._rows.shared(self._state)
        if shared is None:
            return (
                _NO_RUN
                if override
                else self._lookahead.grammar_run(self._state, draft, lambda at: masks.writable(first + at))
            )
        count = self._lookahead.ordinary_run(self._state, draft)
        if not count or (override and shared.only is not None):
            return _NO_RUN
        masks.write_shared(first, shared.words, count)
        return Run(count)

    def _commit_run(self, tokens: list[int]) -> Commit | None:
        """Commit ``tokens`` at once if all of them are one run (see Run); otherwise return None.

        The grammar may have been fed some of them then; the caller takes these back.
        """
        if not self._can_run or not tokens or self._empty_after == tuple(tokens):
            return None
        state, lookahead = self._state, self._lookahead
        if self._rows.shared(state) is None:
            count = lookahead.grammar_run(state, tokens).length
        else:
            count = lookahead.ordinary_run(state, tokens)
        if count < len(tokens):
            return None
        self._keep()
        self._state, self._empty_after = lookahead.after_run(state, count), None
        return Commit(tokens, spans=[RoleSpan(state.default_role, tuple(tokens))])

    @property
    def _can_run(self) -> bool:
        """Whether several tokens may be taken at once: no token is undecided, and there are no bad words."""
        return not self._undecided and self._rules.bad_words is None

    def _write_row(self, state: ConstraintState, masks: MaskRows, index: int) -> FixedRow:
        """Write the row of ``state`` to row ``index`` of ``masks``, and return it."""
        if (shared := self._rows.shared(state)) is not None:
            masks.write_shared(index, shared.words)
            return shared
        row = masks.writable(index)
        self._rows.write(state, row)
        return FixedRow(row)

    def _is_empty_after(self, kept: list[int]) -> bool:
        if self._empty_after is not None:
            return self._empty_after == tuple(kept)
        return not kept and self.allows_nothing


def _single(row: FixedRow) -> list[int]:
    """Return the only token that ``row`` allows, as a list, or an empty list if it allows another number of tokens."""
    return [] if row.only is None else [row.only]

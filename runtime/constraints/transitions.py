"""States of a text, and transitions: from a state and a token to the next state and the roles that become certain.

Lookahead and commit use the same transitions. States are immutable. Only the grammar is mutable, and ``GrammarFeed``
takes back the tokens that a lookahead fed to it.

Delimiters are matched in symbols (engines/text/vocabulary.py), not in tokens, so a phase may begin inside a token.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Literal, NamedTuple

from tandemrt.runtime.constraints import bad_words
from tandemrt.runtime.constraints.delimiters import ROOT, EndDelimiter, last_tokens_covering
from tandemrt.runtime.constraints.grammar_feed import GrammarFeed
from tandemrt.runtime.constraints.rules import ConstraintRules
from tandemrt.runtime.grammars import bitmask
from tandemrt.runtime.grammars.grammar import accepts

Role = Literal["reasoning", "delimiter", "answer"]  # delimiter: the start or end of a reasoning block


class Phase(Enum):
    OPEN = "open"  # no delimiter so far: the model may open a reasoning block or answer
    THINKING = "thinking"
    FORCING = "forcing"  # the budget is spent; the forced end is being emitted
    ANSWER = "answer"
    DONE = "done"


class ConstraintState(NamedTuple):
    """An immutable state. Positions are absolute: index 0 is the first emitted token."""

    phase: Phase
    node: int = ROOT  # node of the delimiter matcher
    spent: int = 0  # reasoning tokens in the current or last block, those of the prompt included
    tail: tuple[int, ...] = ()  # symbols per token of the last tokens, which may belong to an end delimiter
    in_prompt: int = 0  # symbols of an unfinished end delimiter that belong to the prompt
    forced: int = 0  # emitted tokens of the current forced end
    forced_ends: tuple[int, ...] = ()  # position of the first token of each forced end
    length: int = 0  # emitted tokens, which is the position of the next token
    pending: tuple[int, ...] = ()  # OPEN with a grammar: tokens that may begin the start delimiter, not yet fed
    delimiter_only: bool = False  # the grammar rejects `pending`, so it must become the start delimiter
    finish: str | None = None  # the finish reason
    stop_token: int | None = None
    bad_word: int = bad_words.ROOT  # node of the automaton of bad words

    @property
    def default_role(self) -> Role:
        """The role of the next token, unless it becomes part of a delimiter."""
        return "reasoning" if self.phase in (Phase.THINKING, Phase.FORCING) else "answer"

    @property
    def is_forced(self) -> bool:
        """Whether the constraint forces the next token: it belongs to a forced end or to a start delimiter."""
        return self.phase is Phase.FORCING or self.delimiter_only


class RoleUpdate(NamedTuple):
    """Assign ``role`` to all tokens without a role, except the last ``undecided`` symbols of the text.

    The bound is counted in symbols, because a delimiter may begin inside a token. ``splits``: a token that crosses the
    bound is split there. Otherwise the whole token stays undecided.
    """

    role: Role
    undecided: int
    splits: bool = True


class TokenRejected(Exception):
    """The mask row of the state does not allow the token."""


Step = tuple[ConstraintState, tuple[RoleUpdate, ...]]


class Transitions:
    """Transitions between the states of one request. ``feed`` is None without a grammar."""

    def __init__(self, rules: ConstraintRules, feed: GrammarFeed | None) -> None:
        self._rules = rules
        self._feed = feed
        self._nodes = rules.nodes

    def start(self, prompt: Sequence[int]) -> ConstraintState:
        """Return the state after the prompt."""
        if self._rules.matcher is None:
            return ConstraintState(Phase.ANSWER)
        reading = self._rules.matcher.read(prompt)
        if reading.block_open:
            begun = self._nodes[reading.node].close_prefix
            state = ConstraintState(
                Phase.THINKING, node=reading.node, spent=reading.spent, tail=reading.tail, in_prompt=begun
            )
            return self._within_budget(state)
        return ConstraintState(Phase.OPEN if reading.block_open is None else Phase.ANSWER, node=reading.node)

    def step(self, state: ConstraintState, token: int) -> Step:
        """Return the state after ``token`` and the roles that become certain.

        Raises TokenRejected if the row of ``state`` masks out ``token``. The grammar may have been fed part of it then.
        """
        if state.phase is Phase.DONE:
            return state, ()
        length, words = state.length + 1, self._rules.bad_words
        if words is not None and not state.is_forced and not bitmask.allows(words.allowed(state.bad_word), token):
            raise TokenRejected
        after, updates = self._take(state, token)
        if words is not None:
            after = after._replace(bad_word=words.step(state.bad_word, token))
        if after.finish is None and length != self._rules.max_tokens:
            return after._replace(length=length), updates
        # At the end of the text, undecided symbols cannot become part of a delimiter.
        last = updates[-1]._replace(undecided=0)
        return after._replace(length=length, phase=Phase.DONE, finish=after.finish or "length"), (*updates[:-1], last)

    def pending_symbols(self, state: ConstraintState) -> int:
        """Return the number of symbols in the pending tokens. All of them may belong to a start delimiter."""
        return sum(len(self._rules.symbols(token)) for token in state.pending)

    def opening(self, state: ConstraintState, token: int) -> tuple[int, int | None] | None:
        """Return how ``token`` continues a start delimiter that covers all output so far; None if it does not.

        The result is a pair. The first element is the matcher's node after ``token``. The second is the number of
        symbols of ``token`` that complete the delimiter, or None if the delimiter stays unfinished.
        """
        rules = self._rules
        if state.phase is not Phase.OPEN or not rules.may_think or not rules.base_without_stops.allows(token):
            return None
        covered, node, end = self.pending_symbols(state), state.node, 0
        for end, symbol in enumerate(rules.symbols(token), 1):
            node = self._nodes[node].next.get(symbol, ROOT)
            if self._nodes[node].opens and len(rules.think_start) >= covered + end:
                return node, end
        return (node, None) if self._nodes[node].open_prefix >= covered + end else None

    def can_continue_reasoning(self, state: ConstraintState, token: int) -> bool:
        """Return whether the grammar accepts the part of ``token`` after an end delimiter in a THINKING ``state``.

        The state of the grammar does not change. True if the token completes no end delimiter.
        """
        return self._can(self._read, state, self._rules.symbols(token))

    def can_open(self, state: ConstraintState, token: int, end: int) -> bool:
        """Return whether the first ``end`` symbols of ``token`` may complete the start delimiter.

        The state of the grammar does not change.
        """
        return self._can(self._opened, state, self._rules.symbols(token), end)

    def _take(self, state: ConstraintState, token: int) -> Step:
        if state.phase is Phase.FORCING:
            return self._take_forced(state, token)
        if state.phase is Phase.THINKING:
            # If the token ends the reasoning, `_read` feeds the rest of it to the grammar, which may reject it.
            if not self._rules.base_without_stops.allows(token):
                raise TokenRejected
            return self._read(state, self._rules.symbols(token))
        if state.phase is Phase.OPEN and self._feed:
            return self._take_first(self._feed, state, token)
        return self._take_answer(state, token)

    def _take_forced(self, state: ConstraintState, token: int) -> Step:
        rules = self._rules
        if token != rules.forced_end[state.forced]:
            raise TokenRejected
        assert rules.thinking is not None
        begin = len(rules.thinking.vocabulary.symbols_of(rules.forced_end[: state.forced]))
        end = begin + len(rules.symbols(token))
        # With a grammar only tokens that it was fed are the answer, so all later tokens here belong to the delimiter.
        parts: list[tuple[Role, int]] = [("reasoning", rules.forced_delimiter.start)]
        parts += [("delimiter", rules.forced_delimiter.stop), ("delimiter" if self._feed else "answer", end)]
        updates = tuple(RoleUpdate(role, max(0, end - stop)) for role, stop in parts if stop > begin)
        forced, ends = state.forced + 1, state.forced_ends if state.forced else (*state.forced_ends, state.length)
        if forced == len(rules.forced_end):
            return state._replace(phase=Phase.ANSWER, node=ROOT, tail=(), forced=0, forced_ends=ends), updates
        return state._replace(forced=forced, forced_ends=ends), updates

    def _take_first(self, feed: GrammarFeed, state: ConstraintState, token: int) -> Step:
        """Take a token in phase OPEN with a grammar: the text has neither begun to reason nor to answer.

        Tokens that fit both the start delimiter and the grammar are pending. A token that fits only the delimiter
        commits the text to it. A token that completes the delimiter opens a block, unless the grammar rejects the
        rest of that token.
        """
        tokens = (*state.pending, token)
        rules = self._rules
        allowed = rules.answer_base(state.length).allows(token)
        legal = not state.delimiter_only and allowed and accepts(feed.grammar, tokens)
        node, end = self.opening(state, token) or (ROOT, 0)
        if end is None:
            after = state._replace(node=node, pending=tokens, delimiter_only=not legal)
            return after, (RoleUpdate("answer" if legal else "delimiter", self.pending_symbols(after)),)
        begun = state._replace(pending=(), delimiter_only=False)
        if end and self.can_open(begun, token, end):
            return self._opened(begun, rules.symbols(token), end)
        if not legal:
            raise TokenRejected
        after = state._replace(phase=Phase.ANSWER, node=ROOT, pending=())
        return self._feed_tokens(feed, after, tokens), (RoleUpdate("answer", 0),)

    def _take_answer(self, state: ConstraintState, token: int) -> Step:
        if not self._rules.answer_base(state.length).allows(token):
            raise TokenRejected
        if self._feed:
            return self._feed_tokens(self._feed, state, (token,)), (RoleUpdate("answer", 0),)
        if token in self._rules.stop_ids:
            return state._replace(finish="stop", stop_token=token), (RoleUpdate("answer", 0),)
        return self._read(state, self._rules.symbols(token))

    def _read(self, state: ConstraintState, symbols: Sequence[int]) -> Step:
        """Advance by ``symbols``: those of a token, or the rest of a token that a delimiter ended inside."""
        nodes, node, thinking = self._nodes, state.node, state.phase is Phase.THINKING
        if node != ROOT or not self._rules.first_symbols.isdisjoint(symbols):
            for end, symbol in enumerate(symbols, 1):
                node = nodes[node].next.get(symbol, ROOT)
                if thinking and (closing := nodes[node].closes):
                    return self._closed(state, symbols, end, closing)
                if not thinking and nodes[node].opens:
                    return self._opened(state, symbols, end)
        if thinking:
            undecided = nodes[node].close_prefix
            tail = last_tokens_covering((*state.tail, len(symbols)), undecided) if undecided else ()
            in_prompt = self._prompt_symbols(state, undecided - len(symbols))
            after = state._replace(node=node, spent=state.spent + 1, tail=tail, in_prompt=in_prompt)
            after = self._within_budget(after)
            return after, (RoleUpdate("reasoning", 0 if after.phase is Phase.FORCING else undecided, False),)
        after = state if node == state.node else state._replace(node=node)
        return after, (RoleUpdate("answer", nodes[node].open_prefix, False),)

    def _closed(self, state: ConstraintState, symbols: Sequence[int], end: int, closing: EndDelimiter) -> Step:
        """Advance by a token whose first ``end`` symbols complete an end delimiter."""
        size, rest = len(closing.symbols), symbols[end:]
        marked, before = 0, size - end  # reasoning tokens inside the delimiter; delimiter symbols before this token
        for length in reversed(state.tail):
            before -= length
            if before < 0:
                break
            marked += 1
        spent = state.spent - marked + (end > size)  # this token is a reasoning token if it begins with reasoning
        after = state._replace(phase=Phase.ANSWER, node=ROOT, tail=(), spent=spent, in_prompt=0)
        role: Role = "answer" if closing.implicit else "delimiter"
        updates = RoleUpdate("reasoning", len(rest) + size), RoleUpdate(role, len(rest))
        if self._feed is None:
            after, more = self._read(after, rest) if rest else (after, ())
            return after, (*updates, *more)
        # The grammar describes the output only, so delimiter symbols that belong to the prompt are not fed.
        delimiter = closing.symbols[self._prompt_symbols(state, size - end) :]
        answer = (*(delimiter if closing.implicit else ()), *rest)
        return self._feed_symbols(self._feed, after, answer), (*updates, RoleUpdate("answer", 0))

    def _prompt_symbols(self, state: ConstraintState, size: int) -> int:
        """Return how many of the last ``size`` symbols before a token belong to the prompt.

        The symbols are those of an unfinished end delimiter.
        """
        return max(0, size - self._nodes[state.node].close_prefix + state.in_prompt) if state.in_prompt else 0

    def _opened(self, state: ConstraintState, symbols: Sequence[int], end: int) -> Step:
        """Advance by a token whose first ``end`` symbols complete the start delimiter."""
        rest = symbols[end:]
        size = len(self._rules.think_start)
        updates = RoleUpdate("answer", len(rest) + size), RoleUpdate("delimiter", len(rest))
        begun = state._replace(phase=Phase.THINKING, node=ROOT, spent=0, tail=())
        if not rest:
            return self._within_budget(begun), updates
        # The token completes the delimiter, so it is not a reasoning token.
        after, more = self._read(begun._replace(spent=-1), rest)
        return after._replace(spent=0, tail=()), (*updates, *more)

    def _feed_symbols(self, feed: GrammarFeed, state: ConstraintState, symbols: Sequence[int]) -> ConstraintState:
        """Feed part of a token to the grammar, as tokens with the same symbols that are no stop tokens."""
        assert self._rules.thinking is not None
        tokens = self._rules.thinking.vocabulary.tokenize_symbols(symbols, self._rules.grammar_stops)
        if tokens is None:
            raise TokenRejected
        return self._feed_tokens(feed, state, tokens) if tokens else state

    def _feed_tokens(self, feed: GrammarFeed, state: ConstraintState, tokens: Sequence[int]) -> ConstraintState:
        for token in tokens:
            if not feed.accept(token):
                raise TokenRejected
        if feed.grammar.is_terminated() or tokens[-1] in self._rules.stop_ids:
            return state._replace(finish="stop", stop_token=tokens[-1])
        return state

    def _within_budget(self, state: ConstraintState) -> ConstraintState:
        if self._rules.budget is None or state.spent < self._rules.budget:
            return state
        return state._replace(phase=Phase.FORCING, node=ROOT, in_prompt=0)

    def _can(self, advance: Callable[..., object], *arguments: object) -> bool:
        """Return whether ``advance`` raises no TokenRejected, and take back the tokens that it fed to the grammar."""
        try:
            if self._feed is None:
                advance(*arguments)
            else:
                with self._feed.restored():
                    advance(*arguments)
        except TokenRejected:
            return False
        return True

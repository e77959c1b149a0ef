"""The phases of one request's text, as transitions on an immutable state (docs/design.md, section 5).

``Phases.write_row`` says what may come next in a state, ``Phases.step`` what a token makes of it. Looking ahead and
committing are the same two calls; only the grammar has state of its own, and ``undo`` takes back what it was fed.

Markers are found in what tokens spell, symbol by symbol (engines/vocabulary.py), so a phase may begin inside a token.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import numpy as np

from tandemrt.engines.errors import BadRequest
from tandemrt.runtime.constraints import bitmask
from tandemrt.runtime.constraints.bitmask import FixedRow
from tandemrt.runtime.constraints.grammar import Grammar, accepts, taken_back
from tandemrt.runtime.constraints.markers import NO_MARKERS, ROOT, Closing, Marker
from tandemrt.runtime.constraints.state import Kind, Phase, Refused, State, Told
from tandemrt.runtime.constraints.thinking import ThinkingRule, reaching, read_prompt


class Phases:
    """Rows and transitions of one request. Holds the request's grammar and nothing else that changes."""

    def __init__(
        self,
        base: np.ndarray,
        stop_ids: frozenset[int],
        rule: ThinkingRule | None,
        grammar: Grammar | None,
        min_tokens: int,
        max_tokens: int | None,
    ) -> None:
        self.grammar = grammar
        self._rule = rule
        self._matcher = rule.matcher if rule else None
        self._nodes, self._first = (
            (self._matcher.nodes, self._matcher.first) if self._matcher else (NO_MARKERS, frozenset[int]())
        )
        self._start: Marker = rule.vocabulary.spelled(rule.start) if rule else ()
        self._forced_end = rule.forced_end if rule else ()
        self._forced_marker = rule.forced_marker if rule else range(0)
        self._budget = rule.budget if rule else None
        self._stop_ids, self._min_tokens, self._max_tokens = stop_ids, min_tokens, max_tokens
        self._base = FixedRow(base)
        self._base_unstoppable = FixedRow(bitmask.without(base, stop_ids))
        # A grammar may end with tokens that end nothing else: those of the bundle where a request ignores them.
        self._grammar_stops = frozenset(grammar.stop_ids) | stop_ids if grammar else stop_ids
        self._answer_unstoppable = FixedRow(bitmask.without(base, self._grammar_stops))
        self._fed = 0  # tokens the grammar was fed since the last `keep` or `undo`
        self._may_open = rule is not None and all(map(self._base.allows, rule.start))
        self._thinking_rows: dict[tuple[int, int], FixedRow] = {}
        self._plain: set[int] = set()

    def start(self, prompt: Sequence[int]) -> State:
        if self._rule is None:
            return State(Phase.ANSWER)
        reading = read_prompt(self._rule, prompt)
        if reading.block_open:
            begun = self._nodes[reading.node].close_prefix
            state = State(Phase.THINKING, node=reading.node, spent=reading.spent, tail=reading.tail, in_prompt=begun)
            return self._within_budget(state)
        return State(Phase.OPEN if reading.block_open is None else Phase.ANSWER, node=reading.node)

    def fork(self) -> "Phases":
        copy = object.__new__(Phases)
        copy.__dict__.update(self.__dict__)
        copy.grammar = self.grammar.fork() if self.grammar else None
        return copy

    def keep(self) -> None:
        """Make what the grammar was fed final."""
        self._fed = 0

    def undo(self) -> None:
        """Take back what the grammar was fed since the last ``keep``."""
        if self.grammar and self._fed:
            self.grammar.rollback(self._fed)
        self._fed = 0

    def shared_row(self, state: State) -> FixedRow | None:
        """The row of ``state`` if it is one that many states share and nobody changes, else None: see write_row."""
        if state.phase is Phase.THINKING:
            return self._thinking_row(state)
        if self.grammar is None and state.phase in (Phase.OPEN, Phase.ANSWER):
            return self._answer_base(state)
        return None

    def write_row(self, state: State, row: np.ndarray) -> None:
        """Write the tokens that may follow ``state`` into an int32[words] row; a finished state allows everything."""
        shared = self.shared_row(state)
        if shared is not None:
            row[:] = shared.words
        elif state.phase is Phase.DONE:
            row[:] = bitmask.ALL
        elif state.phase is Phase.FORCING:
            bitmask.allow_only(row, self._forced(state))
        else:
            assert self.grammar is not None
            self._write_grammar_row(self.grammar, state, row)

    def look_ahead(self, state: State, tokens: Sequence[int]) -> None:
        """The rows of ``state`` and behind ``tokens`` will be written."""
        if self.grammar is not None and tokens and state.phase is Phase.ANSWER:
            self.grammar.look_ahead(tokens)

    def step(self, state: State, token: int) -> tuple[State, tuple[Told, ...]]:
        """Return the state after ``token``, and what it tells. Raises Refused if the state's row forbids it."""
        if state.phase is Phase.DONE:
            return state, ()
        length = state.length + 1
        after, told = self._take(state, token)
        if after.finish is None and length != self._max_tokens:
            return after._replace(length=length), told
        # Nothing becomes part of a marker any more.
        last = told[-1]._replace(left=0)
        return after._replace(length=length, phase=Phase.DONE, finish=after.finish or "length"), (*told[:-1], last)

    def plain_run(self, state: State, tokens: Sequence[int]) -> int:
        """How many of ``tokens`` do nothing but lengthen the text, so that ``lengthened`` is the state behind them.

        The row of each is the shared one of ``state``, no grammar sees them, none begins a marker or ends the text, and
        with the last of them neither the budget is spent nor the text as long as it may be.
        """
        if state.node != ROOT or self.shared_row(state) is None:
            return 0
        most = self._room(state, len(tokens))
        for count in range(most):
            if tokens[count] not in self._plain and not self._is_plain(tokens[count]):
                return count
        return most

    def answer_run(self, state: State, tokens: Sequence[int], write: Callable[[int], np.ndarray] | None = None) -> int:
        """Feed the grammar of an answer those of ``tokens`` that end nothing, up to one that is refused; how many.

        ``lengthened`` is the state behind them. ``write`` gives the rows to be written: of each, and of one refused.
        """
        if self.grammar is None or state.phase is not Phase.ANSWER:
            return 0
        most, base, count = self._room(state, len(tokens)), self._answer_base(state), 0
        try:
            while count < most:
                if write is not None:
                    row = write(count)
                    self.grammar.fill(row)
                    row &= base.words
                token = tokens[count]
                if token in self._grammar_stops or not base.allows(token) or not self.grammar.accept(token):
                    break
                count, self._fed = count + 1, self._fed + 1
        except BadRequest:  # the text is too complex: who goes on hears it again
            pass
        return count

    def lengthened(self, state: State, count: int) -> State:
        """The state behind a run of ``count`` tokens, at least one: see plain_run and answer_run."""
        if state.phase is Phase.THINKING:
            return state._replace(length=state.length + count, spent=state.spent + count, tail=())
        return state._replace(length=state.length + count)

    def forced(self, state: State) -> list[int]:
        """Tokens that spell what must follow ``state``, whatever the model says; none where there is a choice.

        Other tokens may spell the same, so this says what to draft, not what a row allows.
        """
        if state.phase is Phase.FORCING:
            return list(self._forced_end[state.forced :])
        if state.marker_only:
            assert self._rule is not None
            return self._rule.vocabulary.spell(self._start[self._nodes[state.node].open_prefix :]) or []
        answers = state.phase is Phase.ANSWER or (state.phase is Phase.OPEN and not self._may_open)
        return self.grammar.forced() if self.grammar and answers else []

    def may_force(self, state: State, tokens: int) -> bool:
        """Whether ``forced`` may say anything once ``tokens`` more tokens are out; a block that ends by itself within
        them is not foreseen."""
        if state.phase is Phase.THINKING:
            return self._budget is not None and self._budget - state.spent <= tokens
        return state.phase is Phase.FORCING or (self.grammar is not None and state.phase is not Phase.DONE)

    def committed(self, state: State) -> bool:
        """Whether what follows ``state`` is written whole, whatever else forbids it; a finished state allows all."""
        return state.phase in (Phase.FORCING, Phase.DONE) or state.marker_only

    def forced_spans(self, state: State) -> list[range]:
        """Where in the output forced ends were written, as far as they are out."""
        begins = [at - 1 for at in state.forced_at]
        return [range(begin, min(begin + len(self._forced_end), state.length)) for begin in begins]

    def symbols(self, token: int) -> Sequence[int]:
        """What a token spells, as far as somebody looks for markers."""
        return self._rule.vocabulary.symbols(token) if self._rule else (token,)

    def spell(self, symbols: Sequence[int]) -> list[int]:
        """Tokens that spell part of a token."""
        assert self._rule is not None
        tokens = self._rule.vocabulary.spell(symbols)
        assert tokens is not None
        return tokens

    def plain_kind(self, state: State) -> Kind:
        """What a token that follows ``state`` is, unless it becomes part of a marker."""
        return "reasoning" if state.phase in (Phase.THINKING, Phase.FORCING) else "answer"

    def _room(self, state: State, most: int) -> int:
        """How many of ``most`` tokens may follow ``state`` before a length or the budget acts."""
        if self._max_tokens is not None:
            most = min(most, self._max_tokens - state.length - 1)
        if state.phase is Phase.THINKING:
            return most if self._budget is None else min(most, self._budget - state.spent - 1)
        return min(most, self._min_tokens - state.length) if state.length < self._min_tokens else most

    def _is_plain(self, token: int) -> bool:
        """Whether ``token`` is allowed, begins no marker and is no stop token; it is known from then on."""
        if not self._base_unstoppable.allows(token) or not (self._matcher is None or self._matcher.is_plain(token)):
            return False
        self._plain.add(token)
        return True

    def _take(self, state: State, token: int) -> tuple[State, tuple[Told, ...]]:
        if state.phase is Phase.FORCING:
            return self._take_forced(state, token)
        if state.phase is Phase.THINKING:
            if not self._thinking_row(state).allows(token):
                raise Refused
            return self._read(state, self.symbols(token))
        if state.phase is Phase.OPEN and self.grammar:
            return self._take_first(self.grammar, state, token)
        return self._take_answer(state, token)

    def _take_forced(self, state: State, token: int) -> tuple[State, tuple[Told, ...]]:
        if token != self._forced(state):
            raise Refused
        assert self._rule is not None
        begin = len(self._rule.vocabulary.spelled(self._forced_end[: state.forced]))
        end = begin + len(self.symbols(token))
        # With a grammar the answer is exactly what the grammar saw, so a forced tail belongs to the boundary.
        parts: list[tuple[Kind, int]] = [("reasoning", self._forced_marker.start)]
        parts += [("marker", self._forced_marker.stop), ("marker" if self.grammar else "answer", end)]
        told = tuple(Told(kind, max(0, end - stop)) for kind, stop in parts if stop > begin)
        forced, at = state.forced + 1, state.forced_at if state.forced else (*state.forced_at, state.length + 1)
        if forced == len(self._forced_end):
            return state._replace(phase=Phase.ANSWER, node=ROOT, tail=(), forced=0, forced_at=at), told
        return state._replace(forced=forced, forced_at=at), told

    def _take_first(self, grammar: Grammar, state: State, token: int) -> tuple[State, tuple[Told, ...]]:
        # A grammar, and no answer token yet: the start marker may come first, if the text begins with it. Tokens that
        # fit both wait in `pending`; those that fit only the marker bind the model to finish it. Of a token that holds
        # all of the marker it is the beginning of a block, unless the rest of the token says otherwise.
        tokens = (*state.pending, token)
        legal = not state.marker_only and self._answer_base(state).allows(token) and accepts(grammar, tokens)
        node, end = self._opening(state, token) or (ROOT, 0)
        if end is None:
            after = state._replace(node=node, pending=tokens, marker_only=not legal)
            return after, (Told("answer" if legal else "marker", self._covered(after)),)
        begun = state._replace(pending=(), marker_only=False)
        if end and self._can(self._opened, begun, self.symbols(token), end):
            return self._opened(begun, self.symbols(token), end)
        if not legal:
            raise Refused
        after = state._replace(phase=Phase.ANSWER, node=ROOT, pending=())
        return self._feed(grammar, after, tokens), (Told("answer", 0),)

    def _take_answer(self, state: State, token: int) -> tuple[State, tuple[Told, ...]]:
        if not self._answer_base(state).allows(token):
            raise Refused
        if self.grammar:
            return self._feed(self.grammar, state, (token,)), (Told("answer", 0),)
        if token in self._stop_ids:
            return state._replace(finish="stop", stop_token=token), (Told("answer", 0),)
        return self._read(state, self.symbols(token))

    def _read(self, state: State, symbols: Sequence[int]) -> tuple[State, tuple[Told, ...]]:
        """Go on with ``symbols``, what a token spells or, behind a marker in it, the rest of that."""
        nodes, node, thinking = self._nodes, state.node, state.phase is Phase.THINKING
        if node != ROOT or not self._first.isdisjoint(symbols):
            for end, symbol in enumerate(symbols, 1):
                node = nodes[node].next.get(symbol, ROOT)
                if thinking and (closing := nodes[node].closes):
                    return self._closed(state, symbols, end, closing)
                if not thinking and nodes[node].opens:
                    return self._opened(state, symbols, end)
        if thinking:
            undecided = nodes[node].close_prefix
            tail = reaching((*state.tail, len(symbols)), undecided) if undecided else ()
            in_prompt = self._of_prompt(state, undecided - len(symbols))
            after = state._replace(node=node, spent=state.spent + 1, tail=tail, in_prompt=in_prompt)
            after = self._within_budget(after)
            return after, (Told("reasoning", 0 if after.phase is Phase.FORCING else undecided, False),)
        after = state if node == state.node else state._replace(node=node)
        return after, (Told("answer", nodes[node].open_prefix, False),)

    def _closed(
        self, state: State, symbols: Sequence[int], end: int, closing: Closing
    ) -> tuple[State, tuple[Told, ...]]:
        """An end marker is complete behind ``end`` symbols of a token."""
        size, rest = len(closing.symbols), symbols[end:]
        marked, before = 0, size - end  # tokens of the block that the marker takes; its symbols in front of this token
        for length in reversed(state.tail):
            before -= length
            if before < 0:
                break
            marked += 1
        spent = state.spent - marked + (end > size)  # the token itself is reasoning if it holds some
        after = state._replace(phase=Phase.ANSWER, node=ROOT, tail=(), spent=spent, in_prompt=0)
        kind: Kind = "answer" if closing.implicit else "marker"
        told = Told("reasoning", len(rest) + size), Told(kind, len(rest))
        if self.grammar is None:
            after, more = self._read(after, rest) if rest else (after, ())
            return after, (*told, *more)
        # The grammar is that of the output: what the prompt has of a marker is none of it.
        marker = closing.symbols[self._of_prompt(state, size - end) :]
        answer = (*(marker if closing.implicit else ()), *rest)
        return self._feed_text(self.grammar, after, answer), (*told, Told("answer", 0))

    def _of_prompt(self, state: State, size: int) -> int:
        """How many of the last ``size`` symbols in front of a token, of an unfinished end marker, are the prompt's."""
        return max(0, size - self._nodes[state.node].close_prefix + state.in_prompt) if state.in_prompt else 0

    def _opened(self, state: State, symbols: Sequence[int], end: int) -> tuple[State, tuple[Told, ...]]:
        """The start marker is complete behind ``end`` symbols of a token."""
        rest = symbols[end:]
        told = Told("answer", len(rest) + len(self._start)), Told("marker", len(rest))
        begun = state._replace(phase=Phase.THINKING, node=ROOT, spent=0, tail=())
        if not rest:
            return self._within_budget(begun), told
        # The token holds the end of the marker, so it is no reasoning token.
        after, more = self._read(begun._replace(spent=-1), rest)
        return after._replace(spent=0, tail=()), (*told, *more)

    def _opening(self, state: State, token: int) -> tuple[int, int | None] | None:
        """Whether ``token`` goes on with a start marker that all of the text so far belongs to, None if not.

        Else the node behind it and, if it completes the marker, how many of its symbols do so.
        """
        if state.phase is not Phase.OPEN or not self._may_open or not self._base_unstoppable.allows(token):
            return None
        covered, node, end = self._covered(state), state.node, 0
        for end, symbol in enumerate(self.symbols(token), 1):
            node = self._nodes[node].next.get(symbol, ROOT)
            if self._nodes[node].opens and len(self._start) >= covered + end:
                return node, end
        return (node, None) if self._nodes[node].open_prefix >= covered + end else None

    def _covered(self, state: State) -> int:
        """Symbols of what is pending: all of the text so far may be part of a start marker."""
        return sum(len(self.symbols(token)) for token in state.pending)

    def _feed_text(self, grammar: Grammar, state: State, symbols: Sequence[int]) -> State:
        """Feed a part of a token, in tokens that spell it and end nothing."""
        assert self._rule is not None
        tokens = self._rule.vocabulary.spell(symbols, self._grammar_stops)
        if tokens is None:
            raise Refused
        return self._feed(grammar, state, tokens) if tokens else state

    def _feed(self, grammar: Grammar, state: State, tokens: Sequence[int]) -> State:
        for token in tokens:
            if not grammar.accept(token):
                raise Refused
            self._fed += 1
        if grammar.is_terminated() or tokens[-1] in self._stop_ids:
            return state._replace(finish="stop", stop_token=tokens[-1])
        return state

    def _within_budget(self, state: State) -> State:
        if self._budget is None or state.spent < self._budget:
            return state
        return state._replace(phase=Phase.FORCING, node=ROOT, in_prompt=0)

    def _forced(self, state: State) -> int:
        return self._forced_end[state.forced]

    def _answer_base(self, state: State) -> FixedRow:
        return self._base if state.length >= self._min_tokens else self._answer_unstoppable

    def _thinking_row(self, state: State) -> FixedRow:
        # All tokens, but no stop token and none in which the reasoning ends and the grammar cannot begin.
        if self.grammar is None or self._matcher is None:
            return self._base_unstoppable
        key = state.node, state.in_prompt
        if key not in self._thinking_rows:
            alike = State(Phase.THINKING, node=state.node, in_prompt=state.in_prompt)
            closing = self._matcher.closing(state.node)
            refused = [token for token in closing if not self._can(self._read, alike, self.symbols(token))]
            self._thinking_rows[key] = FixedRow(bitmask.without(self._base_unstoppable.words, refused))
        return self._thinking_rows[key]

    def _write_grammar_row(self, grammar: Grammar, state: State, row: np.ndarray) -> None:
        if state.marker_only:
            row.fill(0)
        else:
            with taken_back(grammar, state.pending) if state.pending else nullcontext():
                if grammar.is_terminated():
                    row.fill(0)
                else:
                    grammar.fill(row)
            row &= self._answer_base(state).words
        if state.phase is not Phase.OPEN or not self._may_open or self._matcher is None:
            return
        for token in self._matcher.opening(state.node, self._covered(state)):
            if (opening := self._opening(state, token)) is None:
                continue
            if opening[1] is None or self._can(self._opened, state, self.symbols(token), opening[1]):
                bitmask.allow(row, token)

    def _can(self, read: Callable[..., object], *arguments: object) -> bool:
        """Whether the grammar takes what ``read`` feeds it. Leaves no trace."""
        fed = self._fed
        try:
            read(*arguments)
        except Refused:
            return False
        finally:
            if self.grammar:
                self.grammar.rollback(self._fed - fed)
            self._fed = fed
        return True

"""The phases of one request's text, as transitions on an immutable state (docs/design.md, section 5).

``Phases.write_row`` says what may come next in a state, ``Phases.step`` what a token makes of it. Looking ahead and
committing are the same two calls; only the grammar has state of its own, and ``undo`` takes back what it was fed.
"""

from collections.abc import Sequence, Set
from enum import Enum
from typing import Literal, NamedTuple, Protocol

import numpy as np

from tandemrt.runtime.constraints import bitmask
from tandemrt.runtime.constraints.markers import NO_MARKERS, ROOT
from tandemrt.runtime.constraints.thinking import ThinkingRule, read_prompt

Kind = Literal["reasoning", "marker", "answer"]


class Grammar(Protocol):
    """What a grammar engine must do. It sees answer tokens only and terminates by accepting one of ``stop_ids``."""

    @property
    def stop_ids(self) -> Set[int]: ...

    def fill(self, row: np.ndarray) -> None:
        """Write int32[words]: the tokens that may come next. Never called on a terminated grammar."""

    def accept(self, token: int) -> bool:
        """Advance by one token; False leaves the state as it was."""

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` accepted tokens, termination included."""

    def fork(self) -> "Grammar":
        """An independent grammar in the same state."""

    def is_terminated(self) -> bool:
        """Whether the text is complete and closed."""

    def forced(self) -> list[int]:
        """Tokens that spell what the text must go on with; none where there is a choice. Other tokens may spell the
        same, so this says what to draft, not what a row allows."""


class Phase(Enum):
    OPEN = "open"  # no marker so far: the model may open a block or answer
    THINKING = "thinking"
    FORCING = "forcing"  # the budget is spent, the forced end is being emitted
    ANSWER = "answer"
    DONE = "done"


class State(NamedTuple):
    phase: Phase
    node: int = ROOT  # of the marker matcher
    spent: int = 0  # reasoning tokens in the current or last block
    forced: int = 0  # tokens of the forced end that are out
    forced_at: tuple[int, ...] = ()  # `length` at the first token of each forced end
    length: int = 0  # tokens out
    pending: tuple[int, ...] = ()  # OPEN with a grammar: may begin the start marker, not fed to the grammar yet
    marker_only: bool = False  # the grammar refuses `pending`, so it must become the start marker
    finish: str | None = None
    stop_token: int | None = None


class Edge(NamedTuple):
    """A boundary was crossed: the last ``length`` tokens are of this kind, what was undecided before them is plain."""

    length: int
    kind: Kind


class Refused(Exception):
    """The token is not in the mask row of the state."""


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
        self._nodes = rule.matcher.nodes if rule else NO_MARKERS
        self._start = rule.start if rule else ()
        self._forced_end = rule.forced_end if rule else ()
        self._forced_marker = rule.forced_marker if rule else range(0)
        self._budget = rule.budget if rule else None
        self._stop_ids, self._min_tokens, self._max_tokens = stop_ids, min_tokens, max_tokens
        self._base = base
        self._base_unstoppable = bitmask.without(base, stop_ids)
        # A grammar may end with tokens that end nothing else: those of the bundle where a request ignores them.
        self._answer_unstoppable = bitmask.without(self._base_unstoppable, grammar.stop_ids if grammar else ())
        self._fed = 0  # tokens the grammar was fed since the last `keep` or `undo`
        self._may_open = rule is not None and all(bitmask.allows(base, token) for token in self._start)
        self._thinking_rows: dict[int, np.ndarray] = {}
        self._refused_ends = {
            end for end in (rule.implicit_ends if rule else ()) if grammar and not _accepts(grammar, end)
        }

    def start(self, prompt: Sequence[int]) -> State:
        if self._rule is None:
            return State(Phase.ANSWER)
        reading = read_prompt(self._rule, prompt)
        if reading.block_open:
            return self._within_budget(State(Phase.THINKING, node=reading.node, spent=reading.spent))
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

    def shared_row(self, state: State) -> np.ndarray | None:
        """The row of ``state`` if it is one that many states share and nobody changes, else None: see write_row."""
        if state.phase is Phase.THINKING:
            return self._thinking_row(state.node)
        if self.grammar is None and state.phase in (Phase.OPEN, Phase.ANSWER):
            return self._answer_base(state)
        return None

    def write_row(self, state: State, row: np.ndarray) -> None:
        """Write the tokens that may follow ``state`` into an int32[words] row; a finished state allows everything."""
        shared = self.shared_row(state)
        if shared is not None:
            row[:] = shared
        elif state.phase is Phase.DONE:
            row[:] = bitmask.ALL
        elif state.phase is Phase.FORCING:
            bitmask.allow_only(row, self._forced(state))
        elif state.marker_only:
            bitmask.allow_only(row, self._openers(state)[0])
        else:
            assert self.grammar is not None
            self._write_grammar_row(self.grammar, state, row)

    def step(self, state: State, token: int) -> tuple[State, Edge | None]:
        """Return the state after ``token``. Raises Refused if the state's row forbids it."""
        if state.phase is Phase.DONE:
            return state, None
        length = state.length + 1
        after, edge = self._take(state, token)
        if after.finish is None and length != self._max_tokens:
            return after._replace(length=length), edge
        return after._replace(length=length, phase=Phase.DONE, finish=after.finish or "length"), edge

    def forced_spans(self, state: State) -> list[range]:
        """Where in the output forced ends were written, as far as they are out."""
        begins = [at - 1 for at in state.forced_at]
        return [range(begin, min(begin + len(self._forced_end), state.length)) for begin in begins]

    def undecided(self, state: State) -> int:
        """How many of the last tokens may still turn out to be part of a marker."""
        if state.phase in (Phase.FORCING, Phase.DONE):
            return 0
        if state.phase is Phase.THINKING:
            return self._nodes[state.node].close_prefix
        return len(state.pending) if self.grammar else self._nodes[state.node].open_prefix

    def plain_kind(self, state: State) -> Kind:
        """What a token that follows ``state`` is, unless it becomes part of a marker."""
        if state.phase is Phase.THINKING:
            return "reasoning"
        if state.phase is Phase.FORCING:
            if state.forced < self._forced_marker.start:
                return "reasoning"
            # With a grammar the answer is exactly what the grammar saw, so a forced tail belongs to the boundary.
            return "marker" if state.forced in self._forced_marker or self.grammar else "answer"
        return "answer"

    def _take(self, state: State, token: int) -> tuple[State, Edge | None]:
        if state.phase is Phase.FORCING:
            return self._take_forced(state, token), None
        if state.phase is Phase.THINKING:
            return self._take_reasoning(state, token)
        if state.phase is Phase.OPEN and self.grammar:
            return self._take_first(self.grammar, state, token)
        return self._take_answer(state, token)

    def _take_forced(self, state: State, token: int) -> State:
        if token != self._forced(state):
            raise Refused
        forced, at = state.forced + 1, state.forced_at if state.forced else (*state.forced_at, state.length + 1)
        if forced == len(self._forced_end):
            return state._replace(phase=Phase.ANSWER, node=ROOT, forced=0, forced_at=at)
        return state._replace(forced=forced, forced_at=at)

    def _take_reasoning(self, state: State, token: int) -> tuple[State, Edge | None]:
        if not bitmask.allows(self._thinking_row(state.node), token):
            raise Refused
        node = self._nodes[state.node].next.get(token, ROOT)
        closing = self._nodes[node].closes
        if closing is None:
            return self._within_budget(state._replace(node=node, spent=state.spent + 1)), None
        length = len(closing.tokens)
        after = state._replace(phase=Phase.ANSWER, node=ROOT, spent=state.spent - (length - 1))
        if not closing.implicit:
            return after, Edge(length, "marker")
        if self.grammar:
            after = self._feed(self.grammar, after, closing.tokens)
        return after, Edge(length, "answer")

    def _take_first(self, grammar: Grammar, state: State, token: int) -> tuple[State, Edge | None]:
        # A grammar, and no answer token yet: the start marker may come first, if it begins with the first token. Tokens
        # that fit both wait in `pending`; those that fit only the marker bind the model to finish it.
        tokens = (*state.pending, token)
        legal = not state.marker_only and bitmask.allows(self._answer_base(state), token) and _accepts(grammar, tokens)
        if token in self._openers(state):
            node = self._nodes[state.node].next.get(token, ROOT)
            if self._nodes[node].opens:
                return self._open_block(state._replace(pending=(), marker_only=False))
            return state._replace(node=node, pending=tokens, marker_only=not legal), None
        if not legal:
            raise Refused
        return self._feed(grammar, state._replace(phase=Phase.ANSWER, node=ROOT, pending=()), tokens), None

    def _take_answer(self, state: State, token: int) -> tuple[State, Edge | None]:
        if not bitmask.allows(self._answer_base(state), token):
            raise Refused
        if self.grammar:
            return self._feed(self.grammar, state, (token,)), None
        if token in self._stop_ids:
            return state._replace(finish="stop", stop_token=token), None
        node = self._nodes[state.node].next.get(token, ROOT)
        if self._nodes[node].opens:
            return self._open_block(state)
        return (state if node == state.node else state._replace(node=node)), None

    def _feed(self, grammar: Grammar, state: State, tokens: tuple[int, ...]) -> State:
        for token in tokens:
            if not grammar.accept(token):
                raise Refused
            self._fed += 1
        if grammar.is_terminated() or tokens[-1] in self._stop_ids:
            return state._replace(finish="stop", stop_token=tokens[-1])
        return state

    def _open_block(self, state: State) -> tuple[State, Edge]:
        after = self._within_budget(state._replace(phase=Phase.THINKING, node=ROOT, spent=0))
        return after, Edge(len(self._start), "marker")

    def _within_budget(self, state: State) -> State:
        if self._budget is None or state.spent < self._budget:
            return state
        return state._replace(phase=Phase.FORCING, node=ROOT)

    def _forced(self, state: State) -> int:
        return self._forced_end[state.forced]

    def _answer_base(self, state: State) -> np.ndarray:
        return self._base if state.length >= self._min_tokens else self._answer_unstoppable

    def _thinking_row(self, node: int) -> np.ndarray:
        # All tokens, but no stop token and none that completes an implicit end the grammar cannot begin with.
        if node not in self._thinking_rows:
            refused = [
                token
                for token, child in self._nodes[node].next.items()
                if (closing := self._nodes[child].closes) and closing.implicit and closing.tokens in self._refused_ends
            ]
            self._thinking_rows[node] = bitmask.without(self._base_unstoppable, refused)
        return self._thinking_rows[node]

    def _openers(self, state: State) -> tuple[int, ...]:
        # The tokens that begin the start marker, or carry on one that covers all of this phase's tokens.
        if state.phase is not Phase.OPEN or not self._may_open:
            return ()
        begun = self._nodes[state.node].open_prefix
        carried_on = (self._start[begun],) if begun >= len(state.pending) else ()
        return carried_on if state.pending else (*carried_on, self._start[0])

    def _write_grammar_row(self, grammar: Grammar, state: State, row: np.ndarray) -> None:
        taken = sum(map(grammar.accept, state.pending))
        if grammar.is_terminated():
            row[:] = 0
        else:
            grammar.fill(row)
        grammar.rollback(taken)
        row &= self._answer_base(state)
        for token in self._openers(state):
            bitmask.allow(row, token)


def _accepts(grammar: Grammar, tokens: Sequence[int]) -> bool:
    taken = 0
    for token in tokens:
        if not grammar.accept(token):
            break
        taken += 1
    grammar.rollback(taken)
    return taken == len(tokens)

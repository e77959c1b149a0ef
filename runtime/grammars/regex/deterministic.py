"""Deterministic automata of regular expressions with lookaheads, lookbehinds and anchors.

A thread is a state of the nondeterministic automaton with the lookaheads that it passed and that are not decided yet.
Each of these has threads of its own. A lookbehind is followed from the beginning of a text, by no thread.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from tandemrt.runtime.grammars.regex.automaton import TOO_LARGE, Condition, Nfa, character_classes
from tandemrt.runtime.grammars.regex.syntax import Range, UnsupportedPattern

MAX_STATES = 256
MAX_STEPS = 40_000  # transitions of threads and of their pending lookaheads: a measure of the work

# Per state: the next state by character class. A class is a set of characters that no pattern distinguishes.
Table = list[dict[int, int]]


class _Thread(NamedTuple):
    state: int
    pending: "frozenset[tuple[int, _Threads]]" = frozenset()  # lookaheads by number, and their threads


_Threads = frozenset[_Thread]


class _State(NamedTuple):
    threads: _Threads
    lookbehinds: tuple[_Threads, ...]  # of each lookbehind


def deterministic(patterns: tuple[str, ...]) -> tuple[Table, frozenset[int], list[list[Range]]]:
    """Build the smallest complete deterministic automaton of the texts that contain a match of a pattern.

    Returns the transitions by state and character class, the accepting states, and the classes. State 0 is the first.
    Raises UnsupportedPattern if there are too many states.
    """
    run = _Run(Nfa(patterns))
    first = run.first()
    known, table, pending = {first: 0}, [dict[int, int]()], [first]
    while pending:
        state = pending.pop()
        row = table[known[state]]
        for index in range(len(run.classes)):
            after = run.after(state, index)
            if after not in known:
                if len(known) >= MAX_STATES:
                    raise UnsupportedPattern(TOO_LARGE)
                known[after] = len(table)
                table.append({})
                pending.append(after)
            row[index] = known[after]
    return *_minimized(table, {known[state] for state in known if run.accepts(state.threads)}), run.classes


class _Run:
    """Computes the state of all threads after a character."""

    def __init__(self, nfa: Nfa) -> None:
        self._nfa = nfa
        self._lookbehinds = [condition for condition in nfa.conditions if not condition.ahead]
        self.classes = character_classes(nfa.ranges())
        self._steps = nfa.by_class(self.classes)
        self._all_ends = nfa.ends.union(condition.end for condition in nfa.conditions)
        self._steps_left = MAX_STEPS

    def first(self) -> _State:
        begins = [_Thread(begin) for begin in self._nfa.starts]
        return self._state([[_Thread(condition.begin)] for condition in self._lookbehinds], lambda _: begins)

    def after(self, state: _State, index: int) -> _State:
        """Return the state after a character of the class ``index``."""
        lookbehinds = [self._moved(threads, index, frozenset()) for threads in state.lookbehinds]
        return self._state(lookbehinds, lambda met: self._moved(state.threads, index, met))

    def accepts(self, threads: _Threads) -> bool:
        """Return whether a text that ends here is accepted."""
        return self._ends(threads, self._nfa.ends)

    def _state(
        self, lookbehinds: Iterable[Iterable[_Thread]], threads: Callable[[frozenset[int]], Iterable[_Thread]]
    ) -> _State:
        """Return the state of ``lookbehinds``, and of the threads by the lookbehinds that match here."""
        met: frozenset[int] = frozenset()
        followed = []
        for condition, inner in zip(self._lookbehinds, lookbehinds, strict=True):
            followed.append(self._closed(inner, met))
            if any(thread.state == condition.end for thread in followed[-1]):
                met |= {condition.number}
        return _State(self._closed(threads(met), met), tuple(followed))

    def _moved(self, threads: _Threads, index: int, met: frozenset[int]) -> Iterator[_Thread]:
        """Yield the threads directly after a character. ``met``: the lookbehinds that match there."""
        for thread in threads:
            targets = self._steps[thread.state].get(index, ())
            if not targets:
                continue
            pending: frozenset[tuple[int, _Threads]] | None = frozenset()
            for number, inner in thread.pending:
                following = self._closed(self._moved(inner, index, met), met)
                pending = None if pending is None else self._with(pending, self._nfa.conditions[number], following)
            if pending is not None:
                yield from (_Thread(target, pending) for target in targets)

    def _closed(self, threads: Iterable[_Thread], met: frozenset[int]) -> _Threads:
        """Return the threads that transitions without characters reach, and that read one or end."""
        reached: set[_Thread] = set()
        left = list(threads)
        while left:
            thread = left.pop()
            if thread in reached:
                continue
            reached.add(thread)
            self._count(1 + len(thread.pending))
            left += (thread._replace(state=target) for target in self._nfa.unconditional(thread.state))
            for condition, target in self._nfa.conditional(thread.state):
                pending: frozenset[tuple[int, _Threads]] | None = thread.pending
                if condition.ahead:
                    ahead = self._closed([_Thread(condition.begin)], met)
                    pending = self._with(thread.pending, condition, ahead)
                elif (condition.number in met) == condition.negated:
                    pending = None
                if pending is not None:
                    left.append(_Thread(target, pending))
        return self._needed(reached)

    def _needed(self, threads: set[_Thread]) -> _Threads:
        """Return the threads without those that accept nothing that another one does not."""
        for thread in threads:
            if thread.state in self._nfa.final and not thread.pending:
                return frozenset([thread])
        least: dict[int, list[frozenset[tuple[int, _Threads]]]] = {}
        for state, pending in sorted(threads, key=lambda thread: len(thread.pending)):
            if self._steps[state] or state in self._all_ends:
                known = least.setdefault(state, [])
                if not any(other <= pending for other in known):
                    known.append(pending)
        return frozenset(_Thread(state, pending) for state, every in least.items() for pending in every)

    def _count(self, steps: int) -> None:
        self._steps_left -= steps
        if self._steps_left < 0:
            raise UnsupportedPattern(TOO_LARGE)

    def _with(
        self, pending: frozenset[tuple[int, _Threads]], condition: Condition, threads: _Threads
    ) -> frozenset[tuple[int, _Threads]] | None:
        """Return ``pending`` with a lookahead that has ``threads`` now; None if it failed."""
        if any(thread.state == condition.end and not thread.pending for thread in threads):
            return None if condition.negated else pending  # it matches whatever follows
        if not threads:
            return pending if condition.negated else None
        return pending | {(condition.number, threads)}

    def _ends(self, threads: _Threads, ends: set[int]) -> bool:
        return any(
            thread.state in ends and all(self._holds_at_end(*each) for each in thread.pending) for thread in threads
        )

    def _holds_at_end(self, number: int, threads: _Threads) -> bool:
        condition = self._nfa.conditions[number]
        return self._ends(threads, {condition.end}) != condition.negated


def _minimized(table: Table, accepting: set[int]) -> tuple[Table, frozenset[int]]:
    """Minimize the automaton; state 0 stays the first."""
    group = [int(state in accepting) for state in range(len(table))]
    while True:
        kinds: dict[tuple[int, ...], int] = {}
        finer = [
            kinds.setdefault((group[state], *(group[row[index]] for index in sorted(row))), len(kinds))
            for state, row in enumerate(table)
        ]
        if len(kinds) == len(set(group)):
            break
        group = finer
    order = {kind: index for index, kind in enumerate(dict.fromkeys(group))}
    smallest: Table = [{} for _ in order]
    for state, row in enumerate(table):
        smallest[order[group[state]]] = {index: order[group[target]] for index, target in row.items()}
    return smallest, frozenset(order[group[state]] for state in accepting)

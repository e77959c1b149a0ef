"""The complement of regular expressions: an expression for the texts that contain no match of any of them."""

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import chain

from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.syntax import LAST, Anchor, Characters, Group, Item, Range, UnsupportedPattern

MAX_STATES = 256  # of the deterministic automaton
MAX_NFA_STATES = 1024
MAX_LENGTH = 1 << 13  # characters of the written expression
_EMPTY = ""  # the expression that matches only the empty text; None matches no text

# Per state: the next state by character class. A class is a set of characters that no pattern distinguishes.
_Table = list[dict[int, int]]


@lru_cache(maxsize=256)
def complement(found: tuple[str, ...]) -> str | None:
    """Return an expression for the texts that contain no match of ``found``, or None if there is no such text.

    Raises UnsupportedPattern if the result would be too large.
    """
    table, accepting, classes = _dfa(found)
    return _to_expression(table, [state for state in range(len(table)) if state not in accepting], classes)


@lru_cache(maxsize=256)
def complement_size(found: tuple[str, ...]) -> int:
    """Return the number of states that ``complement`` builds, a measure of its work. Raises UnsupportedPattern."""
    return _Nfa(found).size


def _dfa(found: tuple[str, ...]) -> tuple[_Table, frozenset[int], list[list[Range]]]:
    """Build the complete deterministic automaton of the texts that contain a match of a pattern.

    Returns the transitions by state and character class, the accepting states, and the classes.
    """
    nfa = _Nfa(found)
    classes = _classes(nfa.ranges())
    steps = nfa.by_class(classes)
    first = nfa.epsilon_closure(nfa.starts)
    known, table, pending = {first: 0}, [dict[int, int]()], [first]
    while pending:
        states = pending.pop()
        row = table[known[states]]
        for index in range(len(classes)):
            after = nfa.epsilon_closure(target for state in states for target in steps[state].get(index, ()))
            if after not in known:
                if len(known) >= MAX_STATES:
                    raise UnsupportedPattern("a complement of many cases")
                known[after] = len(table)
                table.append({})
                pending.append(after)
            row[index] = known[after]
    accepting = {known[states] for states in known if not nfa.ends.isdisjoint(states)}
    return *_minimized(table, accepting), classes


class _Nfa:
    """A nondeterministic automaton with epsilon transitions, of the texts that contain a match of a pattern."""

    def __init__(self, found: Iterable[str]) -> None:
        self._epsilon: list[list[int]] = []
        self._steps: list[list[tuple[tuple[Range, ...], int]]] = []
        self.starts: set[int] = set()
        self.ends: set[int] = set()
        for left, right, items in chain.from_iterable(patterns.unanchored(pattern) for pattern in found):
            begin = self._state()
            end = self._sequence(items, begin if left else self._anything(begin))
            self.starts.add(begin)
            self.ends.add(end if right else self._anything(end))

    @property
    def size(self) -> int:
        return len(self._epsilon)

    def _state(self) -> int:
        if len(self._epsilon) >= MAX_NFA_STATES:
            raise UnsupportedPattern("a complement of many cases")
        self._epsilon.append([])
        self._steps.append([])
        return len(self._epsilon) - 1

    def _anything(self, begin: int) -> int:
        end = self._state()
        self._epsilon[begin].append(end)
        self._steps[end].append((((0, LAST),), end))
        return end

    def _sequence(self, items: Iterable[Item], begin: int) -> int:
        """Add a path from ``begin`` over ``items``, and return the state at its end."""
        for item in items:
            least, most = item.bounds()
            for _ in range(least):
                begin = self._atom(item.atom, begin)
            if most is None:
                loop = self._state()
                self._epsilon[begin].append(loop)
                self._epsilon[self._atom(item.atom, loop)].append(loop)
                begin = loop
            else:
                ends = [begin]
                for _ in range(most - least):
                    begin = self._atom(item.atom, begin)
                    ends.append(begin)
                begin = self._state()
                for end in ends:
                    self._epsilon[end].append(begin)
        return begin

    def _atom(self, atom: Characters | Anchor | Group, begin: int) -> int:
        end = self._state()
        if isinstance(atom, Group):
            for branch in atom.branches:
                inner = self._state()
                self._epsilon[begin].append(inner)
                self._epsilon[self._sequence(branch, inner)].append(end)
        else:
            assert isinstance(atom, Characters)  # `unanchored` removed the anchors
            self._steps[begin].append((tuple(atom.covered()), end))
        return end

    def epsilon_closure(self, states: Iterable[int]) -> frozenset[int]:
        """Return ``states`` and all states that epsilon transitions reach."""
        reached, pending = set(), list(states)
        while pending:
            state = pending.pop()
            if state not in reached:
                reached.add(state)
                pending += self._epsilon[state]
        return frozenset(reached)

    def ranges(self) -> list[Range]:
        return [pair for steps in self._steps for ranges, _ in steps for pair in ranges]

    def by_class(self, classes: list[list[Range]]) -> list[dict[int, list[int]]]:
        """Return, by state, the next states by character class."""
        lows = [one[0][0] for one in classes]
        found: list[dict[int, list[int]]] = []
        for steps in self._steps:
            row: dict[int, list[int]] = {}
            for ranges, target in steps:
                for index, low in enumerate(lows):
                    if any(first <= low <= last for first, last in ranges):
                        row.setdefault(index, []).append(target)
            found.append(row)
        return found


def _classes(ranges: list[Range]) -> list[list[Range]]:
    """Partition all characters into classes that no range distinguishes."""
    cuts = sorted({0, *chain.from_iterable((low, high + 1) for low, high in ranges)} - {LAST + 1})
    parts = list(zip(cuts, [*(cut - 1 for cut in cuts[1:]), LAST], strict=True))
    alike: dict[frozenset[Range], list[Range]] = {}
    for part in parts:
        alike.setdefault(frozenset(pair for pair in ranges if pair[0] <= part[0] <= pair[1]), []).append(part)
    return list(alike.values())


def _minimized(table: _Table, accepting: set[int]) -> tuple[_Table, frozenset[int]]:
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
    smallest: _Table = [{} for _ in order]
    for state, row in enumerate(table):
        smallest[order[group[state]]] = {index: order[group[target]] for index, target in row.items()}
    return smallest, frozenset(order[group[state]] for state in accepting)


def _to_expression(table: _Table, ends: Iterable[int], classes: list[list[Range]]) -> str | None:
    """Return an expression for the paths from state 0 to ``ends``, by state elimination."""
    start, end = -1, len(table)
    out: dict[int, dict[int, str]] = {state: _ways(row, classes) for state, row in enumerate(table)}
    out |= {start: {0: _EMPTY}, end: {}}
    for state in ends:
        out[state][end] = _EMPTY
    into: dict[int, set[int]] = {state: set() for state in out}
    for state, ways in out.items():
        for target in ways:
            into[target].add(state)
    left = set(range(len(table)))
    while left:
        middle = min(left, key=lambda state: (len(into[state]) * len(out[state]), state))
        left.discard(middle)
        again = out[middle].pop(middle, None)
        around = "" if again is None else f"(?:{again})*"
        for target in out[middle]:
            into[target].discard(middle)
        for state in into.pop(middle) - {middle}:
            before = out[state].pop(middle) + around
            for target, after in out[middle].items():
                way, known = before + after, out[state].get(target)
                if len(way) > MAX_LENGTH:
                    raise UnsupportedPattern("a complement of many cases")
                out[state][target] = way if known is None else f"(?:{known}|{way})"
                into[target].add(state)
    return out[start].get(end)


def _ways(row: dict[int, int], classes: list[list[Range]]) -> dict[int, str]:
    """Return, by next state, the expression of the characters that lead to it."""
    leading: dict[int, list[Range]] = {}
    for index, target in row.items():
        leading.setdefault(target, []).extend(classes[index])
    ways = {}
    for target, ranges in leading.items():
        with suppress(UnsupportedPattern):  # a class of surrogates only, which no text contains
            ways[target] = Characters(tuple(ranges)).written()
    return ways

"""Nondeterministic automata of regular expressions, and the character classes that they distinguish."""

from collections.abc import Iterable
from itertools import chain

from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.syntax import LAST, Anchor, Characters, Group, Item, Range, UnsupportedPattern

MAX_STATES = 1024


class Nfa:
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
        if len(self._epsilon) >= MAX_STATES:
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


def character_classes(ranges: list[Range]) -> list[list[Range]]:
    """Partition all characters into classes that no range distinguishes."""
    cuts = sorted({0, *chain.from_iterable((low, high + 1) for low, high in ranges)} - {LAST + 1})
    parts = list(zip(cuts, [*(cut - 1 for cut in cuts[1:]), LAST], strict=True))
    alike: dict[frozenset[Range], list[Range]] = {}
    for part in parts:
        alike.setdefault(frozenset(pair for pair in ranges if pair[0] <= part[0] <= pair[1]), []).append(part)
    return list(alike.values())

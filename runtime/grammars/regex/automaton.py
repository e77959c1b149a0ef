"""Nondeterministic automata of regular expressions, and the character classes that they distinguish."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from tandemrt.runtime.grammars.regex import parser
from tandemrt.runtime.grammars.regex.syntax import (
    LAST,
    Anchor,
    Characters,
    Group,
    Item,
    Look,
    Range,
    UnsupportedPattern,
    without_outer_anchors,
)

MAX_STATES = 1024
TOO_LARGE = "a complement, lookahead or lookbehind of many cases"
_ANY = Group(((Item(Characters(((0, LAST),))),),))
_NOTHING_BEFORE = Look(_ANY, ahead=False, negated=True)
_NOTHING_AFTER = Look(_ANY, ahead=True, negated=True)


@dataclass(frozen=True)
class Condition:
    """A lookahead or lookbehind within an automaton: it has the states from ``begin`` to ``end``."""

    number: int
    begin: int
    end: int
    ahead: bool
    negated: bool


class Nfa:
    """A nondeterministic automaton with epsilon transitions, of the texts that contain a match of a pattern.

    ``conditions``: numbered in an order in which one follows those within it. ``final``: states that any text leads
    back to, so that the end of a text is reached whatever follows.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._epsilon: list[list[int]] = []
        self._conditional: dict[int, list[tuple[Condition, int]]] = {}
        self._steps: list[list[tuple[tuple[Range, ...], int]]] = []
        self.conditions: list[Condition] = []
        self.starts: set[int] = set()
        self.ends: set[int] = set()
        self.final: set[int] = set()
        for pattern in patterns:
            for branch in parser.read(pattern).branches:
                self._search(branch)

    @property
    def size(self) -> int:
        return len(self._epsilon)

    def _search(self, items: tuple[Item, ...]) -> None:
        left, right, items = without_outer_anchors(items)
        begin = self._state()
        self.starts.add(begin)
        end = self._sequence(items, begin if left else self._anything(begin))
        if not right:
            end = self._anything(end)
            self.final.add(end)
        self.ends.add(end)

    def _state(self) -> int:
        if len(self._epsilon) >= MAX_STATES:
            raise UnsupportedPattern(TOO_LARGE)
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

    def _atom(self, atom: Characters | Anchor | Look | Group, begin: int) -> int:
        end = self._state()
        if isinstance(atom, Group):
            for branch in atom.branches:
                inner = self._state()
                self._epsilon[begin].append(inner)
                self._epsilon[self._sequence(branch, inner)].append(end)
        elif isinstance(atom, Characters):
            self._steps[begin].append((tuple(atom.covered()), end))
        else:
            look = atom if isinstance(atom, Look) else _NOTHING_BEFORE if atom.sign == "^" else _NOTHING_AFTER
            self._conditional.setdefault(begin, []).append((self._condition(look), end))
        return end

    def _condition(self, look: Look) -> Condition:
        begin, outer = self._state(), len(self.conditions)
        end = self._atom(look.group, begin if look.ahead else self._anything(begin))
        if look.ahead:
            end = self._anything(end)
            self.final.add(end)
        elif any(inner.ahead for inner in self.conditions[outer:]):
            raise UnsupportedPattern("a lookahead, $ or \\b inside a lookbehind")
        self.conditions.append(Condition(len(self.conditions), begin, end, look.ahead, look.negated))
        return self.conditions[-1]

    def conditional(self, state: int) -> list[tuple[Condition, int]]:
        """Return the transitions from ``state`` that read no character and have a condition."""
        return self._conditional.get(state, [])

    def unconditional(self, state: int) -> list[int]:
        """Return the states after the transitions from ``state`` that read no character and have no condition."""
        return self._epsilon[state]

    def ranges(self) -> list[Range]:
        return [pair for steps in self._steps for ranges, _ in steps for pair in ranges]

    def by_class(self, classes: list[list[Range]]) -> list[dict[int, list[int]]]:
        """Return, by state, the next states by character class."""
        lows = [one[0][0] for one in classes]
        table: list[dict[int, list[int]]] = []
        for steps in self._steps:
            row: dict[int, list[int]] = {}
            for ranges, target in steps:
                for index, low in enumerate(lows):
                    if any(first <= low <= last for first, last in ranges):
                        row.setdefault(index, []).append(target)
            table.append(row)
        return table


def character_classes(ranges: list[Range]) -> list[list[Range]]:
    """Partition all characters into classes that no range distinguishes."""
    cuts = sorted({0, *chain.from_iterable((low, high + 1) for low, high in ranges)} - {LAST + 1})
    parts = list(zip(cuts, [*(cut - 1 for cut in cuts[1:]), LAST], strict=True))
    alike: dict[frozenset[Range], list[Range]] = {}
    for part in parts:
        alike.setdefault(frozenset(pair for pair in ranges if pair[0] <= part[0] <= pair[1]), []).append(part)
    return list(alike.values())

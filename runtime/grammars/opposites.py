"""The texts in which no pattern of a list is found, written as an expression: other names, and what is ``not``."""

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from itertools import chain

from tandemrt.runtime.grammars import patterns
from tandemrt.runtime.grammars.pattern_parts import LAST, Anchor, Characters, Group, Item, Range, Unreadable

MOST_STATES = 256  # of an automaton in which each character leads to one state
MOST_PARTS = 1024  # of one that is put together from the parts of patterns
LONGEST = 1 << 13  # characters of what is written
_EMPTY = ""  # the expression of the empty text; None is the one of no text at all

# By state: where its characters lead, as indices into the classes of characters that no pattern tells apart.
_Table = list[dict[int, int]]


@lru_cache(maxsize=256)
def opposite(found: tuple[str, ...]) -> str | None:
    """Write what a text matches in which none of the patterns ``found`` is found; None if there is no such text.

    Raises Unreadable where that is not held.
    """
    table, accepting, classes = _automaton(found)
    return _written(table, [state for state in range(len(table)) if state not in accepting], classes)


@lru_cache(maxsize=256)
def effort(found: tuple[str, ...]) -> int:
    """How much work ``opposite`` is: the parts of the patterns, each as often as it repeats. Raises Unreadable."""
    return _Nets(found).size


def _automaton(found: tuple[str, ...]) -> tuple[_Table, frozenset[int], list[list[Range]]]:
    """A complete deterministic automaton of the texts that have a pattern in them: by state where each class of
    characters leads, the accepting states, and the classes."""
    nets = _Nets(found)
    classes = _classes(nets.ranges())
    steps = nets.by_class(classes)
    first = nets.closed(nets.starts)
    known, table, pending = {first: 0}, [dict[int, int]()], [first]
    while pending:
        states = pending.pop()
        row = table[known[states]]
        for index in range(len(classes)):
            after = nets.closed(target for state in states for target in steps[state].get(index, ()))
            if after not in known:
                if len(known) >= MOST_STATES:
                    raise Unreadable("an opposite of many cases")
                known[after] = len(table)
                table.append({})
                pending.append(after)
            row[index] = known[after]
    accepting = {known[states] for states in known if not nets.ends.isdisjoint(states)}
    return *_merged(table, accepting), classes


class _Nets:
    """An automaton with silent steps, of the texts that have one of some patterns in them."""

    def __init__(self, found: Iterable[str]) -> None:
        self._silent: list[list[int]] = []
        self._steps: list[list[tuple[tuple[Range, ...], int]]] = []
        self.starts: set[int] = set()
        self.ends: set[int] = set()
        for left, right, items in chain.from_iterable(patterns.settled(pattern) for pattern in found):
            begin = self._state()
            end = self._sequence(items, begin if left else self._anything(begin))
            self.starts.add(begin)
            self.ends.add(end if right else self._anything(end))

    @property
    def size(self) -> int:
        return len(self._silent)

    def _state(self) -> int:
        if len(self._silent) >= MOST_PARTS:
            raise Unreadable("an opposite of many cases")
        self._silent.append([])
        self._steps.append([])
        return len(self._silent) - 1

    def _anything(self, begin: int) -> int:
        end = self._state()
        self._silent[begin].append(end)
        self._steps[end].append((((0, LAST),), end))
        return end

    def _sequence(self, items: Iterable[Item], begin: int) -> int:
        """Lead from ``begin`` over ``items``; the state behind them."""
        for item in items:
            least, most = item.bounds()
            for _ in range(least):
                begin = self._atom(item.atom, begin)
            if most is None:
                loop = self._state()
                self._silent[begin].append(loop)
                self._silent[self._atom(item.atom, loop)].append(loop)
                begin = loop
            else:
                ends = [begin]
                for _ in range(most - least):
                    begin = self._atom(item.atom, begin)
                    ends.append(begin)
                begin = self._state()
                for end in ends:
                    self._silent[end].append(begin)
        return begin

    def _atom(self, atom: Characters | Anchor | Group, begin: int) -> int:
        end = self._state()
        if isinstance(atom, Group):
            for branch in atom.branches:
                inner = self._state()
                self._silent[begin].append(inner)
                self._silent[self._sequence(branch, inner)].append(end)
        else:
            assert isinstance(atom, Characters)  # anchors are settled
            self._steps[begin].append((tuple(atom.covered()), end))
        return end

    def closed(self, states: Iterable[int]) -> frozenset[int]:
        """``states`` and all that silent steps lead to."""
        reached, pending = set(), list(states)
        while pending:
            state = pending.pop()
            if state not in reached:
                reached.add(state)
                pending += self._silent[state]
        return frozenset(reached)

    def ranges(self) -> list[Range]:
        return [pair for steps in self._steps for ranges, _ in steps for pair in ranges]

    def by_class(self, classes: list[list[Range]]) -> list[dict[int, list[int]]]:
        """By state: the states that each class of characters leads to."""
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
    """All characters, in sets that no range tells apart."""
    cuts = sorted({0, *chain.from_iterable((low, high + 1) for low, high in ranges)} - {LAST + 1})
    parts = list(zip(cuts, [*(cut - 1 for cut in cuts[1:]), LAST], strict=True))
    alike: dict[frozenset[Range], list[Range]] = {}
    for part in parts:
        alike.setdefault(frozenset(pair for pair in ranges if pair[0] <= part[0] <= pair[1]), []).append(part)
    return list(alike.values())


def _merged(table: _Table, accepting: set[int]) -> tuple[_Table, frozenset[int]]:
    """The smallest automaton of the same texts; state 0 stays the first."""
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


def _written(table: _Table, ends: Iterable[int], classes: list[list[Range]]) -> str | None:
    """The expression of what leads from the first state to one of ``ends``; states are left out one by one."""
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
                if len(way) > LONGEST:
                    raise Unreadable("an opposite of many cases")
                out[state][target] = way if known is None else f"(?:{known}|{way})"
                into[target].add(state)
    return out[start].get(end)


def _ways(row: dict[int, int], classes: list[list[Range]]) -> dict[int, str]:
    """What leads to each state."""
    leading: dict[int, list[Range]] = {}
    for index, target in row.items():
        leading.setdefault(target, []).extend(classes[index])
    ways = {}
    for target, ranges in leading.items():
        with suppress(Unreadable):  # halves of characters are never written
            ways[target] = Characters(tuple(ranges)).written()
    return ways

"""The complement of regular expressions: an expression for the texts that contain no match of any of them."""

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

from tandemrt.runtime.grammars.regex.automaton import Nfa, character_classes
from tandemrt.runtime.grammars.regex.syntax import Characters, Range, UnsupportedPattern

MAX_STATES = 256  # of the deterministic automaton
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
    return Nfa(found).size


def _dfa(found: tuple[str, ...]) -> tuple[_Table, frozenset[int], list[list[Range]]]:
    """Build the complete deterministic automaton of the texts that contain a match of a pattern.

    Returns the transitions by state and character class, the accepting states, and the classes.
    """
    nfa = Nfa(found)
    classes = character_classes(nfa.ranges())
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

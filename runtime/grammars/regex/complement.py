"""Expressions of deterministic automata: for patterns with lookaheads and the like, and for complements."""

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache

from tandemrt.runtime.grammars.regex.automaton import TOO_LARGE, Nfa
from tandemrt.runtime.grammars.regex.deterministic import Table, deterministic
from tandemrt.runtime.grammars.regex.syntax import Characters, Range, UnsupportedPattern

MAX_LENGTH = 1 << 14  # characters of the written expression
_EMPTY = ""  # the expression that matches only the empty text; None matches no text


@lru_cache(maxsize=256)
def complement(patterns: tuple[str, ...]) -> str | None:
    """Return an expression for the texts that contain no match of ``patterns``, or None if there is no such text.

    Raises UnsupportedPattern if the result would be too large.
    """
    table, accepting, classes = deterministic(patterns)
    return _to_expression(table, [state for state in range(len(table)) if state not in accepting], classes)


@lru_cache(maxsize=256)
def without_conditions(pattern: str) -> str | None:
    """Return an expression for the texts that contain a match of ``pattern``, without lookaheads and the like.

    Returns None if there is no such text. Raises UnsupportedPattern if the result would be too large.
    """
    table, accepting, classes = deterministic((pattern,))
    return _to_expression(table, accepting, classes)


@lru_cache(maxsize=256)
def complement_size(patterns: tuple[str, ...]) -> int:
    """Return the number of states that ``complement`` builds, a measure of its work. Raises UnsupportedPattern."""
    return Nfa(patterns).size


def _to_expression(table: Table, ends: Iterable[int], classes: list[list[Range]]) -> str | None:
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
                    raise UnsupportedPattern(TOO_LARGE)
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

"""The syntax tree of regular expressions, and how it is written for a grammar engine.

``written`` uses only character sets, groups, alternatives and repetitions.
"""

import re
from dataclasses import dataclass

Range = tuple[int, int]
LAST = 0x10FFFF
BOUNDS = re.compile(r"\{(\d{1,9})(,(\d{1,9})?)?\}")


class UnsupportedPattern(Exception):
    """A construct of a regular expression that is not supported; the message names it."""


class MalformedPattern(UnsupportedPattern):
    """A text that is no regular expression of ECMA-262."""


@dataclass(frozen=True)
class Characters:
    ranges: tuple[Range, ...]
    properties: tuple[str, ...] = ()  # Unicode properties in the engine's syntax
    negated: bool = False

    def written(self) -> str:
        if self.properties:
            inside = "".join(map(_range, _without_surrogates(self.ranges))) + "".join(self.properties)
            return f"[[{'^' if self.negated else ''}{inside}]--\\x00]"
        ranges = _without_surrogates(inverted(self.ranges) if self.negated else self.ranges)
        if not ranges:
            raise UnsupportedPattern("an empty character class")
        if ranges == [(0, LAST)]:
            return "(?s:.)"
        return character_class(ranges)

    def covered(self) -> list[Range]:
        """Return the ranges of the set in order. Raises UnsupportedPattern for Unicode properties."""
        if self.properties:
            raise UnsupportedPattern("a Unicode class together with its complement")
        return inverted(self.ranges) if self.negated else merged(list(self.ranges))


@dataclass(frozen=True)
class Anchor:
    sign: str


@dataclass(frozen=True)
class Look:
    """A lookahead or lookbehind: the texts after or before its place begin or end with a match of ``group``, or not."""

    group: "Group"
    ahead: bool
    negated: bool


@dataclass(frozen=True)
class Group:
    branches: tuple[tuple["Item", ...], ...]

    def has(self, *kinds: type) -> bool:
        """Return whether the group or a group within it has an atom of ``kinds``."""
        return any(
            isinstance(item.atom, kinds) or (isinstance(item.atom, Group) and item.atom.has(*kinds))
            for branch in self.branches
            for item in branch
        )

    def written(self) -> str:
        return f"(?:{'|'.join(map(sequence, self.branches))})"


@dataclass(frozen=True)
class Item:
    atom: Characters | Anchor | Look | Group
    repeats: str = ""

    def bounds(self) -> tuple[int, int | None]:
        """Return the minimum and maximum number of repetitions; a maximum of None is no limit."""
        if match := BOUNDS.match(self.repeats):
            return int(match[1]), (int(match[1]) if match[2] is None else int(match[3]) if match[3] else None)
        return {"": (1, 1), "?": (0, 1), "*": (0, None), "+": (1, None)}[self.repeats]


def without_outer_anchors(items: tuple[Item, ...]) -> tuple[bool, bool, tuple[Item, ...]]:
    """Return whether a branch begins with ``^`` and ends with ``$``, and its items without them."""
    left = right = False
    while items and items[0].atom == Anchor("^"):
        items, left = items[1:], True
    while items and items[-1].atom == Anchor("$"):
        items, right = items[:-1], True
    return left, right, items


def sequence(items: tuple[Item, ...]) -> str:
    """Write one branch without its anchors; it has no lookaheads or lookbehinds."""
    return "".join(f"{item.atom.written()}{item.repeats}" for item in items if not isinstance(item.atom, Anchor | Look))


def merged(ranges: list[Range]) -> list[Range]:
    """Return the same characters as sorted ranges that do not touch."""
    union: list[Range] = []
    for low, high in sorted(ranges):
        if union and low <= union[-1][1] + 1:
            union[-1] = (union[-1][0], max(high, union[-1][1]))
        else:
            union.append((low, high))
    return union


def inverted(ranges: tuple[Range, ...] | list[Range]) -> list[Range]:
    """Return the ranges of all other characters."""
    gaps, start = [], 0
    for low, high in merged(list(ranges)):
        if low > start:
            gaps.append((start, low - 1))
        start = high + 1
    return [*gaps, (start, LAST)] if start <= LAST else gaps


def _without_surrogates(ranges: tuple[Range, ...] | list[Range]) -> list[Range]:
    kept = []
    for low, high in merged(list(ranges)):
        low, high = (0xE000 if 0xD800 <= low < 0xE000 else low), (0xD7FF if 0xD800 <= high < 0xE000 else high)
        if low <= high:
            kept.append((low, high))
    return kept


def _range(pair: Range) -> str:
    low, high = pair
    return character(low) if low == high else f"{character(low)}-{character(high)}"


def character_class(ranges: list[Range]) -> str:
    """Write a set of characters that is not empty."""
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return character(ranges[0][0])
    return f"[{''.join(map(_range, ranges))}]"


def character(code: int) -> str:
    """Write one character."""
    return chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\x{{{code:X}}}"

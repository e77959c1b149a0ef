"""Rewrite ECMA-262 regular expressions as anchored expressions for a grammar engine.

Dialects of regular expressions differ in shorthands, in the characters that ``.`` excludes, in anchors and in escapes.
The rewritten expressions (syntax.py) use none of these.
"""

import re
from collections.abc import Iterator

from tandemrt.runtime.grammars.regex.parser import MAX_GROUP_DEPTH, read
from tandemrt.runtime.grammars.regex.syntax import (
    Anchor,
    Characters,
    Group,
    Item,
    UnsupportedPattern,
    character,
    sequence,
)

MAX_BRANCHES = 256  # after anchors inside groups are resolved
ANYTHING = "(?s:.)*"
_WRITTEN = re.compile(r"\\x\{([0-9A-F]+)\}")


def search_expression(pattern: str) -> str:
    """Return an expression for the texts that contain a match of ``pattern``, as in JSON Schema.

    Raises UnsupportedPattern.
    """
    branches = []
    for left, right, items in unanchored(pattern):
        branches.append(("" if left else ANYTHING) + sequence(items) + ("" if right else ANYTHING))
    return _either(branches)


def fullmatch_expression(pattern: str) -> str:
    """Return an expression for the texts that ``pattern`` matches completely. Raises UnsupportedPattern."""
    return _either([sequence(items) for _, _, items in unanchored(pattern)])


def other_than(words: list[str]) -> str:
    """Return an expression for all texts except ``words``. Raises UnsupportedPattern if they are too long."""
    if max(map(len, words), default=0) > MAX_GROUP_DEPTH:
        raise UnsupportedPattern(f"a name of more than {MAX_GROUP_DEPTH} characters together with others")
    return _other_than(sorted(set(words)), 0)


def literal(text: str) -> str:
    return "".join(character(ord(letter)) for letter in text)


def matches(written: str, text: str) -> bool:
    """Return whether a whole text matches an expression that this module wrote. Raises UnsupportedPattern."""
    if "--\\x00]" in written:
        raise UnsupportedPattern("a Unicode class together with names")
    return re.fullmatch(_WRITTEN.sub(lambda code: f"\\U{int(code[1], 16):08x}", written), text) is not None


def _other_than(words: list[str], at: int) -> str:
    """Return an expression for what may follow the first ``at`` characters, which ``words`` share, except ``words``."""
    ways = [] if len(words[0]) == at else [""]
    begun: dict[str, list[str]] = {}
    for word in words:
        if len(word) > at:
            begun.setdefault(word[at], []).append(word)
    if not begun:
        return f"(?s:.){ANYTHING}"
    others = Characters(tuple((ord(letter), ord(letter)) for letter in sorted(begun)), negated=True).written()
    ways += [
        others + ANYTHING,
        *(character(ord(letter)) + _other_than(same, at + 1) for letter, same in begun.items()),
    ]
    return f"(?:{'|'.join(ways)})"


def unanchored(pattern: str) -> Iterator[tuple[bool, bool, tuple[Item, ...]]]:
    """Yield the branches of a pattern without anchors: anchored at the beginning, at the end, and the items.

    Raises UnsupportedPattern.
    """
    count = 0
    for branch in read(pattern).branches:
        for alone in _unanchored(branch, False, False):
            count += 1
            if count > MAX_BRANCHES:
                raise UnsupportedPattern("anchors in more than a few groups")
            yield alone


def _unanchored(items: tuple[Item, ...], left: bool, right: bool) -> Iterator[tuple[bool, bool, tuple[Item, ...]]]:
    while items and items[0].atom == Anchor("^"):
        items, left = items[1:], True
    while items and items[-1].atom == Anchor("$"):
        items, right = items[:-1], True
    for index in {0, len(items) - 1} if items else ():
        group = items[index].atom
        if isinstance(group, Group) and not items[index].repeats and group.anchored():
            for branch in group.branches:
                yield from _unanchored((*items[:index], *branch, *items[index + 1 :]), left, right)
            return
    if Group((items,)).anchored():
        raise UnsupportedPattern("an anchor inside the pattern")
    yield left, right, items


def _either(branches: list[str]) -> str:
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

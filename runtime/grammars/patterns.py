"""Regular expressions of ECMA-262, read here and written for the engine as what they match: a whole text.

The engines' own dialects differ in shorthands, in what ``.`` leaves out, in anchors and escapes; what is written for
them (pattern_parts.py) has none of these.
"""

import re
from collections.abc import Iterator

from tandemrt.runtime.grammars.pattern_parts import Anchor, Characters, Group, Item, Unreadable, character, sequence
from tandemrt.runtime.grammars.pattern_reader import DEEPEST_GROUP, read

MOST_BRANCHES = 256  # that anchors within groups may come to
ANYTHING = "(?s:.)*"
_WRITTEN = re.compile(r"\\x\{([0-9A-F]+)\}")


def whole(pattern: str) -> str:
    """Write what a whole text matches in which ``pattern`` is found, as a JSON schema means it. Raises Unreadable."""
    branches = []
    for left, right, items in settled(pattern):
        branches.append(("" if left else ANYTHING) + sequence(items) + ("" if right else ANYTHING))
    return _either(branches)


def full(pattern: str) -> str:
    """Write what a whole text matches that ``pattern`` matches from its beginning to its end. Raises Unreadable."""
    return _either([sequence(items) for _, _, items in settled(pattern)])


def other_than(words: list[str]) -> str:
    """Write what every text but ``words`` matches. Raises Unreadable where they are too long."""
    if max(map(len, words), default=0) > DEEPEST_GROUP:
        raise Unreadable(f"a name of more than {DEEPEST_GROUP} characters beside others")
    return _other_than(sorted(set(words)), 0)


def literal(text: str) -> str:
    return "".join(character(ord(letter)) for letter in text)


def matches(written: str, text: str) -> bool:
    """Whether a whole text fits an expression as it is written here. Raises Unreadable."""
    if "--\\x00]" in written:
        raise Unreadable("a class of Unicode beside names")
    return re.fullmatch(_WRITTEN.sub(lambda code: f"\\U{int(code[1], 16):08x}", written), text) is not None


def _other_than(words: list[str], at: int) -> str:
    """What follows the first ``at`` characters, which all ``words`` share, in any text but them."""
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


def settled(pattern: str) -> Iterator[tuple[bool, bool, tuple[Item, ...]]]:
    """The branches of a pattern without anchors, and whether each is held at its beginning and at its end.

    Raises Unreadable.
    """
    count = 0
    for branch in read(pattern).branches:
        for alone in _unanchored(branch, False, False):
            count += 1
            if count > MOST_BRANCHES:
                raise Unreadable("anchors in more than a few groups")
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
        raise Unreadable("an anchor inside the pattern")
    yield left, right, items


def _either(branches: list[str]) -> str:
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

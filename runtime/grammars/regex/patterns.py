"""Rewrite ECMA-262 regular expressions as anchored expressions for a grammar engine.

Dialects of regular expressions differ in shorthands, in the characters that ``.`` excludes, in anchors and in escapes.
The rewritten expressions (syntax.py) use none of these.
"""

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from tandemrt.engines.text.common_prefix import common_prefix_length
from tandemrt.runtime.grammars.regex.complement import without_conditions
from tandemrt.runtime.grammars.regex.parser import MAX_GROUP_DEPTH, read
from tandemrt.runtime.grammars.regex.syntax import (
    Anchor,
    Characters,
    Group,
    Item,
    Look,
    UnsupportedPattern,
    character,
    inverted,
    sequence,
    without_outer_anchors,
)

MAX_BRANCHES = 256  # after anchors inside groups are resolved
ANYTHING = "(?s:.)*"
_PARTS = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|.", re.DOTALL)  # an escape, a class, or any other character
_CODE = re.compile(r"\\x\{([0-9A-F]+)\}")  # of a character, as syntax.py writes it
_WRITTEN_CODE = re.compile(r"\\x(?=\{)")
_WITH_PROPERTY = re.compile(r"\[(\[[^\[\]]*\])--\\x00\]")
_CLASS = re.compile(r"\[[^\[\]]+\]")


def search_expression(pattern: str) -> str:
    """Return an expression for the texts that contain a match of ``pattern``, as in JSON Schema.

    Raises UnsupportedPattern.
    """
    try:
        branches = [
            ("" if left else ANYTHING) + sequence(items) + ("" if right else ANYTHING)
            for left, right, items in _unanchored(pattern)
        ]
    except _Conditional:
        return _without_conditions(pattern)
    return _either(branches)


def split_conditions(pattern: str) -> tuple[str, list[str], list[str]]:
    """Split lookaheads after a leading ``^`` and lookbehinds before a final ``$`` off a pattern without alternatives.

    Returns the rest, patterns that a text must contain as well, and patterns that it must not contain. Raises
    UnsupportedPattern.
    """
    required: list[str] = []
    forbidden: list[str] = []
    rest = pattern
    while rest.startswith(("^(?=", "^(?!")):
        end = next((end for _, end in _groups(rest)), None)
        if end is None:
            raise UnsupportedPattern("a missing closing parenthesis")
        (required if rest[3] == "=" else forbidden).append(f"^(?:{rest[4:end]}")
        rest = f"^{rest[end:]}"
    while rest.endswith(")$"):
        begin, end = max(_groups(rest), default=(0, 0))
        if end < len(rest) - 1 or not rest.startswith(("(?<=", "(?<!"), begin):
            break
        (required if rest[begin + 3] == "=" else forbidden).append(f"(?:{rest[begin + 4 :]}")
        rest = f"{rest[:begin]}$"
    if rest != pattern and len(read(rest).branches) > 1:
        return pattern, [], []
    return rest, required, forbidden


def fullmatch_expression(pattern: str) -> str:
    """Return an expression for the texts that ``pattern`` matches completely. Raises UnsupportedPattern."""
    try:
        return _either([sequence(items) for _, _, items in _unanchored(pattern)])
    except _Conditional:
        return _without_conditions(f"^(?:{pattern})$")


def _without_conditions(pattern: str) -> str:
    written = without_conditions(pattern)
    if written is None:
        raise UnsupportedPattern("a pattern that no text matches")
    return written


def as_pattern(written: str) -> str:
    """Return an expression that this module wrote as a pattern of ECMA-262."""
    return _WRITTEN_CODE.sub(r"\\u", _WITH_PROPERTY.sub(r"\1", written).replace("(?s:.)", "[^]"))


def other_than(words: list[str]) -> str:
    """Return an expression for all texts except ``words``. Raises UnsupportedPattern if they nest too deep."""
    return _other_than(sorted(set(words)), 0, MAX_GROUP_DEPTH)


def literal(text: str) -> str:
    return "".join(character(ord(letter)) for letter in text)


def matches(written: str, text: str) -> bool:
    """Return whether a whole text matches an expression that this module wrote. Raises UnsupportedPattern."""
    if "--\\x00]" in written:
        raise UnsupportedPattern("a Unicode class together with names")
    return _in_python(written).fullmatch(text) is not None


@lru_cache(maxsize=1024)
def _in_python(written: str) -> re.Pattern[str]:
    return re.compile(_CODE.sub(_python_code, _CLASS.sub(_shorter_class, written)))


def _shorter_class(match: re.Match[str]) -> str:
    """Write a class by what it excludes if that is less: Python compiles every character of a class."""
    [[item]] = read(match[0].replace("\\x{", "\\u{")).branches
    assert isinstance(item.atom, Characters)
    ranges = item.atom.covered()
    others = inverted(ranges)
    if not others or sum(high - low for low, high in ranges) <= sum(high - low for low, high in others):
        return match[0]
    return "[^" + "".join(f"\\x{{{low:X}}}-\\x{{{high:X}}}" for low, high in others) + "]"


def _python_code(match: re.Match[str]) -> str:
    return f"\\U{int(match[1], 16):08x}"


def _groups(pattern: str) -> Iterator[tuple[int, int]]:
    """Yield the begin and the end of the groups of a pattern that are not inside another group."""
    depth = begin = 0
    for part in _PARTS.finditer(pattern):
        if part[0] == "(":
            begin = begin if depth else part.start()
            depth += 1
        elif part[0] == ")":
            depth -= 1
            if not depth:
                yield begin, part.end()


def _other_than(words: list[str], at: int, depth: int) -> str:
    """Return an expression for what may follow the first ``at`` characters, which ``words`` share, except ``words``."""
    if not depth:
        raise UnsupportedPattern(f"more than {MAX_GROUP_DEPTH} names that begin with each other, together with others")
    # The words are in order, so all share what these two share.
    shared = words[0][at : common_prefix_length(words[0], words[-1])]
    if len(shared) > 1:
        after = _other_than(words, at + len(shared), depth - 1)
        return f"(?:{_not_beginning(shared)}|{literal(shared)}{after})"
    ways = [] if len(words[0]) == at else [""]
    begun: dict[str, list[str]] = {}
    for word in words:
        if len(word) > at:
            begun.setdefault(word[at], []).append(word)
    if not begun:
        return f"(?s:.){ANYTHING}"
    ways += [
        _other_letter(begun) + ANYTHING,
        *(character(ord(letter)) + _other_than(same, at + 1, depth - 1) for letter, same in begun.items()),
    ]
    return f"(?:{'|'.join(ways)})"


def _not_beginning(text: str) -> str:
    """Return an expression for the texts that do not begin with ``text``. It halves ``text``, to nest little."""
    if len(text) == 1:
        return f"(?:|{_other_letter(text)}{ANYTHING})"
    half = len(text) // 2
    return f"(?:{_not_beginning(text[:half])}|{literal(text[:half])}{_not_beginning(text[half:])})"


def _other_letter(letters: Iterable[str]) -> str:
    return Characters(tuple((ord(letter), ord(letter)) for letter in sorted(letters)), negated=True).written()


def _unanchored(pattern: str) -> Iterator[tuple[bool, bool, tuple[Item, ...]]]:
    """Yield the branches of a pattern without anchors: anchored at the beginning, at the end, and the items.

    Raises UnsupportedPattern; _Conditional if an anchor or a lookahead remains.
    """
    count = 0
    for branch in read(pattern).branches:
        for alone in _without_anchors(branch, False, False):
            count += 1
            if count > MAX_BRANCHES:
                raise UnsupportedPattern("anchors in more than a few groups")
            yield alone


def _without_anchors(items: tuple[Item, ...], left: bool, right: bool) -> Iterator[tuple[bool, bool, tuple[Item, ...]]]:
    begins, ends, items = without_outer_anchors(items)
    left, right = left or begins, right or ends
    for index in {0, len(items) - 1} if items else ():
        group = items[index].atom
        if isinstance(group, Group) and not items[index].repeats and group.has(Anchor):
            for branch in group.branches:
                yield from _without_anchors((*items[:index], *branch, *items[index + 1 :]), left, right)
            return
    if Group((items,)).has(Anchor, Look):
        raise _Conditional("an anchor inside the pattern")
    yield left, right, items


class _Conditional(UnsupportedPattern):
    """A branch whose match depends on the text around a place."""


def _either(branches: list[str]) -> str:
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"

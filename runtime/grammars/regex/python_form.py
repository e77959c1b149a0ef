"""Write patterns of ECMA-262 for Python's ``re``, which matches the same texts then."""

import re
import unicodedata
from functools import cache, lru_cache

from tandemrt.runtime.grammars.regex.parser import read
from tandemrt.runtime.grammars.regex.syntax import (
    LAST,
    Anchor,
    Characters,
    Group,
    Item,
    Look,
    MalformedPattern,
    Range,
    UnsupportedPattern,
    inverted,
    merged,
)

_NAMED_GROUP = re.compile(r"\(\?<(?=[A-Za-z_])")  # as ECMA-262 writes it


@lru_cache(maxsize=1024)
def python_form(pattern: str) -> str:
    """Return an expression that finds in a text what ``pattern`` finds.

    A pattern with constructs that the parser does not support, such as back-references, stays as it is.
    """
    try:
        return _group(read(pattern))
    except UnsupportedPattern:
        return _NAMED_GROUP.sub("(?P<", pattern)


def is_pattern(text: str) -> bool:
    """Return whether ``text`` is a pattern, supported or not, of ECMA-262 or of Python.

    Raises RecursionError or OverflowError for a pattern that Python's ``re`` cannot hold.
    """
    try:
        read(text)
    except UnsupportedPattern as reason:
        try:
            re.compile(text)
        except re.error:
            return not isinstance(reason, MalformedPattern)
    return True


def _group(group: Group) -> str:
    return f"(?:{'|'.join(''.join(map(_item, branch)) for branch in group.branches)})"


def _item(item: Item) -> str:
    match item.atom:
        case Characters():
            written = _characters(item.atom)
        case Anchor(sign=sign):
            written = r"\A" if sign == "^" else r"\Z"
        case Look(group=group, ahead=ahead, negated=negated):
            written = f"(?{'' if ahead else '<'}{'!' if negated else '='}{_group(group)})"
        case Group():
            written = _group(item.atom)
    return written + item.repeats


def _characters(characters: Characters) -> str:
    ranges = merged([*characters.ranges, *(pair for name in characters.properties for pair in _with_property(name))])
    ranges = inverted(ranges) if characters.negated else ranges
    others = inverted(ranges)
    if not ranges:
        return "(?!)"
    # Python compiles every character of a class, so the smaller one is written.
    if sum(high - low for low, high in ranges) <= sum(high - low for low, high in others):
        return f"[{_ranges(ranges)}]"
    return f"[^{_ranges(others)}]" if others else r"[\s\S]"


def _ranges(ranges: list[Range]) -> str:
    return "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)


@cache
def _with_property(name: str) -> list[Range]:
    r"""Return the characters of a general category that is written as in ``\p{Lu}``, or all others for ``\P{Lu}``."""
    category = name[3:-1]
    ranges = merged([(code, code) for code in range(LAST + 1) if unicodedata.category(chr(code)).startswith(category)])
    return inverted(ranges) if name[1] == "P" else ranges

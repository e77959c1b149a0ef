"""List the texts of an expression that matches only a few."""

from collections.abc import Iterable

from tandemrt.runtime.grammars.regex import parser, patterns
from tandemrt.runtime.grammars.regex.syntax import Anchor, Characters, Group, Item, Look, UnsupportedPattern

_MAX_LENGTH = 256  # of a listed text


def few_texts(written: str, most: int) -> set[str] | None:
    """Return the texts that an expression of ``patterns`` matches, or None if these may be more than ``most``."""
    if "*" in written or "+" in written:  # characters of a text are escaped
        return None
    try:
        return _of_branches(parser.read(patterns.as_pattern(written)), most)
    except UnsupportedPattern:  # Unicode properties
        return None


def _of_branches(group: Group, most: int) -> set[str] | None:
    union: set[str] = set()
    for branch in group.branches:
        texts: set[str] | None = {""}
        for item in branch:
            texts = _followed(texts, _repeated(item, most), most)
        if texts is None or len(union | texts) > most:
            return None
        union |= texts
    return union


def _repeated(item: Item, most: int) -> set[str] | None:
    assert not isinstance(item.atom, Anchor | Look)
    once = _of_branches(item.atom, most) if isinstance(item.atom, Group) else _of_characters(item.atom, most)
    if once is None or once == {""}:
        return once
    least, limit = item.bounds()
    if limit is None:
        return None
    texts: set[str] | None = {""}
    for _ in range(least):
        texts = _followed(texts, once, most)
        if texts is None:
            return None
    for _ in range(limit - least):
        texts = _followed(texts, once | {""}, most)
        if texts is None:
            return None
    return texts


def _of_characters(characters: Characters, most: int) -> set[str] | None:
    ranges = characters.covered()
    if sum(high - low + 1 for low, high in ranges) > most:
        return None
    return {chr(code) for low, high in ranges for code in range(low, high + 1)}


def _followed(texts: Iterable[str] | None, more: Iterable[str] | None, most: int) -> set[str] | None:
    joined = {text + other for text in texts or () for other in more or ()}
    known = texts is not None and more is not None and len(joined) <= most
    return joined if known and max(map(len, joined), default=0) <= _MAX_LENGTH else None

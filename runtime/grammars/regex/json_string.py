r"""Expressions for the JSON strings whose values match an expression: each character as it is or escaped.

A character has up to three spellings: as it is, a short escape (``\n``), and ``\uXXXX`` with digits of either case, or
two of these for a character above U+FFFF.
"""

import json
import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache

from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.parser import read
from tandemrt.runtime.grammars.regex.syntax import (
    LAST,
    Characters,
    Range,
    character_class,
    inverted,
    merged,
)

_SHORT = {'"': '"', "\\": "\\\\", "/": "\\x{2F}", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_ALWAYS_ESCAPED = [(0, 0x1F), (ord('"'), ord('"')), (ord("\\"), ord("\\"))]
# ASCII characters that serializers do not escape. Texts that are known, names and texts of ASCII have them only as they
# are: a text with one continuation keeps it (fast-forward tokens).
_PLAIN = [(ord(letter), ord(letter)) for letter in map(chr, range(0x20, 0x7F)) if letter not in "\"&'/<>\\"]
_SURROGATES = (0xD800, 0xDFFF)
_MOST_ESCAPES = 2048  # characters of an expression for the \u escapes of a set
_ASCII = 0x7F
# An expression of ``patterns`` is read part by part, because its groups may be nested deeper than those of a pattern.
_PARTS = re.compile(
    r"\(\?:|\{[0-9,]+\}|(?P<set>\(\?s:\.\)|\[\[[^\[\]]*\]--\\x00\]|\[[^\[\]]*\]|\\x\{[0-9A-F]+\}|[0-9A-Za-z])"
)
_ANY = Characters(((0, LAST),))


def character(written: str = "(?s:.)") -> str:
    """Return an expression for one character of a JSON string whose text an expression of ``patterns`` matches."""
    sets = _sets(written)
    if any(one.properties for one in sets):
        return _spellings(_ANY, True)
    ranges = merged([pair for one in sets for pair in one.covered()])
    return _spellings(Characters(tuple(ranges)), not _is_ascii(written)) if ranges else _spellings(_ANY, True)


def name_character() -> str:
    """Return an expression for one character of a JSON string, without escapes of plain characters of ASCII."""
    return _spellings(_ANY, False)


def string_of(written: str) -> str:
    """Return an expression for the JSON strings of the texts that an expression of ``patterns`` matches."""
    return f'"(?:{_rewritten(written, plain_escaped=not _is_ascii(written))})"'


def literal(text: str) -> str:
    """Return a Lark expression for the JSON strings of ``text``. Plain characters of ASCII are not escaped."""
    if all(any(low <= ord(letter) <= high for low, high in _PLAIN) for letter in text):
        return json.dumps(f'"{text}"')
    return '/"' + "".join(_spellings(Characters(((ord(letter), ord(letter)),)), False) for letter in text) + '"/'


def name_of(written: str) -> str:
    """Return the expression of ``string_of``, without escapes of plain characters of ASCII."""
    return f'"(?:{_rewritten(written, plain_escaped=False)})"'


def _is_ascii(written: str) -> bool:
    return all(not one.properties and one.covered()[-1][1] <= _ASCII for one in _sets(written))


def _sets(written: str) -> list[Characters]:
    return [_set(part["set"]) for part in _PARTS.finditer(written) if part["set"]]


def _rewritten(written: str, plain_escaped: bool) -> str:
    def part(match: re.Match[str]) -> str:
        return _spellings(_set(match["set"]), plain_escaped) if match["set"] else match[0]

    return _PARTS.sub(part, written)


@lru_cache(maxsize=1024)
def _set(written: str) -> Characters:
    [[item]] = read(patterns.as_pattern(written)).branches
    assert isinstance(item.atom, Characters)
    return item.atom


@lru_cache(maxsize=1024)
def _spellings(characters: Characters, plain_escaped: bool) -> str:
    """Return an expression for the spellings of one character of a set."""
    if characters.properties:
        ranges = _ascii_of(characters)
        raw = f"[{characters.written()}--{character_class(_ALWAYS_ESCAPED)}]"
        escaped = _both(ranges, [(0, 0x1F)])  # the Unicode ranges of a property are too many
    else:
        ranges = _without(characters.covered(), [_SURROGATES])
        usual = _without(ranges, _ALWAYS_ESCAPED)
        raw = character_class(usual) if usual else ""
        escaped = ranges if plain_escaped else _without(ranges, _PLAIN)
    short = [code for letter, code in _SHORT.items() if _both(ranges, [(ord(letter), ord(letter))])]
    unicode = _unicode_escapes(escaped)
    if len(unicode) > _MOST_ESCAPES:
        unicode = _unicode_escapes(_both(escaped, [(0, 0x1F)]))
    after = [*([f"[{''.join(short)}]"] if len(short) > 1 else short), *([unicode] if unicode else [])]
    ways = [*([raw] if raw else []), *([f"\\\\{_either(after)}"] if after else [])]
    return raw if ways == [raw] else f"(?:{'|'.join(ways)})"


def _unicode_escapes(ranges: list[Range]) -> str:
    r"""Return an expression for what follows the backslash in the ``\u`` escapes of the characters of a set."""
    ways = [f"u{_digits(low)}" for low in [_both(ranges, [(0, 0xFFFF)])] if low]
    pairs: dict[tuple[Range, ...], list[Range]] = {}
    for low, high in _both(ranges, [(0x10000, LAST)]):
        first, last = (low - 0x10000) >> 10, (high - 0x10000) >> 10
        for lead in range(first, last + 1):
            least = low - 0x10000 & 0x3FF if lead == first else 0
            most = high - 0x10000 & 0x3FF if lead == last else 0x3FF
            pairs.setdefault(((0xDC00 + least, 0xDC00 + most),), []).append((0xD800 + lead, 0xD800 + lead))
    ways += [f"u{_digits(merged(leads))}\\\\u{_digits(list(trail))}" for trail, leads in pairs.items()]
    return _either(ways) if ways else ""


def _digits(ranges: list[Range], width: int = 4) -> str:
    """Return an expression for the numbers of ``ranges`` in ``width`` hexadecimal digits of either case."""
    size = 16 ** (width - 1)
    by_rest: dict[str, list[int]] = {}
    for digit in range(16):
        inside = [
            (low - digit * size, high - digit * size)
            for low, high in _both(ranges, [(digit * size, (digit + 1) * size - 1)])
        ]
        if inside == [(0, size - 1)]:
            rest = "[0-9a-fA-F]" * (width - 1)
        elif inside:
            rest = _digits(inside, width - 1)
        else:
            continue
        by_rest.setdefault(rest, []).append(digit)
    return _either([f"{_digit_class(digits)}{rest}" for rest, digits in by_rest.items()])


def _digit_class(digits: list[int]) -> str:
    both = "".join(dict.fromkeys(letter for digit in digits for letter in (f"{digit:x}", f"{digit:X}")))
    return both if len(both) == 1 else f"[{both}]"


def _ascii_of(characters: Characters) -> list[Range]:
    """Return the ASCII characters of a set with Unicode properties."""
    kept = []
    for code in range(_ASCII + 1):
        inside = any(low <= code <= high for low, high in characters.ranges) or any(
            (unicodedata.category(chr(code)).startswith(prop[3:-1])) is prop.startswith("\\p")
            for prop in characters.properties
        )
        if inside is not characters.negated:
            kept.append((code, code))
    return merged(kept)


def _both(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    pairs = [(max(low, start), min(high, end)) for low, high in ranges for start, end in others]
    return [(low, high) for low, high in pairs if low <= high]


def _without(ranges: list[Range], others: list[Range]) -> list[Range]:
    return _both(ranges, inverted(others))


def _either(ways: list[str]) -> str:
    return ways[0] if len(ways) == 1 else f"(?:{'|'.join(ways)})"

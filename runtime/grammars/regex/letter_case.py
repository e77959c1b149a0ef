"""Sets of characters in which letters match whatever their case."""

from bisect import bisect_left, bisect_right
from functools import cache

from tandemrt.runtime.grammars.regex.syntax import Characters, Range, merged

_END = 0x1F000  # of the blocks of Unicode with letters of two cases


def without_case(characters: Characters) -> Characters:
    """Add the other case of each letter to a set.

    Dialects disagree whether letters outside of ASCII equal some inside (U+212A, the sign of kelvin, and k). A set does
    not match such a letter, and a negated set excludes it.
    """
    added: list[Range] = []
    letters, others = _cased()
    for low, high in characters.ranges:
        for place in range(bisect_left(letters, low), bisect_right(letters, high)):
            alike = [n for n in others[place] if characters.negated or (n < 128) == (letters[place] < 128)]
            added += [(other, other) for other in alike]
    return Characters(tuple(merged([*characters.ranges, *added])), characters.properties, characters.negated)


def cased_letters(characters: Characters) -> int:
    """Return how many characters in the ranges of a set have another case: the work of ``without_case``."""
    letters, _ = _cased()
    return sum(bisect_right(letters, high) - bisect_left(letters, low) for low, high in characters.ranges)


@cache
def _cased() -> tuple[list[int], list[list[int]]]:
    """Return all characters that have another case, in order, and the others of each."""
    alike: dict[str, set[int]] = {}
    for code in range(_END):
        letter = chr(code)
        for other in {letter.lower(), letter.upper()} - {letter}:
            if len(other) == 1:
                group = alike.get(letter, {code}) | alike.get(other, {ord(other)})
                alike |= dict.fromkeys(map(chr, group), group)
    letters = sorted(map(ord, alike))
    return letters, [sorted(alike[chr(code)] - {code}) for code in letters]

"""Equality of JSON values as JSON Schema defines it, and whether the beginning of a text can still become a value."""

from decimal import Decimal
from functools import lru_cache
from typing import Any

_MOST_EXPONENT = 308  # of a double
_MOST_DIGITS = 400  # of an integer that is compared exactly; a longer one is no double


def number(text: str) -> int | float:
    """Return the value of a JSON number, or NaN for another text."""
    try:
        return int(text) if len(text) <= _MOST_DIGITS and text.lstrip("-").isdigit() else float(text)
    except ValueError:
        return float("nan")


def same_number(one: int | float, other: Any) -> bool:
    """Return whether a number equals a value, exactly or after rounding to doubles, as some readers do."""
    if not isinstance(other, int | float) or isinstance(other, bool):
        return False
    return one == other or _double(one) == _double(other)


def may_become(text: str, value: Any) -> bool:
    """Return whether a beginning of a number may be continued to ``value``; True for any with an exponent."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    mantissa, exponent, _ = text.lower().partition("e")
    digits = mantissa.lstrip("-").replace(".", "").lstrip("0")
    if exponent or not digits:
        return True
    if not value or text.startswith("-") != (value < 0):
        return False
    if abs(value) == float("inf"):
        return len(digits) > _MOST_EXPONENT
    return (_digits(value) + "0" * len(digits))[: len(digits)] == digits


def may_stay(text: str, value: Any) -> bool:
    """Return whether all continuations of a beginning of a number may equal ``value``."""
    mantissa, exponent, _ = text.lower().partition("e")
    if not exponent:
        return may_become(text, value)
    return same_number(number(text), value) or (value == 0 and not mantissa.strip("-0."))


@lru_cache(maxsize=4096)
def _digits(value: int | float) -> str:
    """Return the digits of a number other than 0, from the first to the last one that is not 0."""
    found = Decimal(repr(value)).as_tuple().digits
    return "".join(map(str, found)).strip("0")


def _double(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else -float("inf")

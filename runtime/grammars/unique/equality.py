"""Equality of JSON values as JSON Schema defines it, and whether the beginning of a text can still become a value."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

_MOST_EXPONENT = 308  # of a double
_MOST_DIGITS = 400  # of an integer that is compared exactly; a longer one is no double
_COMPARED_DIGITS = 40  # of a beginning; a double has at most 17


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
    double = abs(_double(value))
    if not math.isfinite(double):  # NaN: the value is no number yet
        return not math.isnan(double) and len(digits) > _MOST_EXPONENT
    least, most, wraps = _rounding_to(double)
    first = digits[:_COMPARED_DIGITS]
    from_least, to_most = least[: len(first)] <= first, first <= most[: len(first)]
    return from_least or to_most if wraps else from_least and to_most


def may_stay(text: str, value: Any) -> bool:
    """Return whether all continuations of a beginning of a number may equal ``value``."""
    mantissa, exponent, _ = text.lower().partition("e")
    if not exponent:
        return may_become(text, value)
    return same_number(number(text), value) or (value == 0 and not mantissa.strip("-0."))


def distinct_beginning(text: str) -> str:
    """Return what distinguishes a beginning of a number from others, for the values that it may become.

    Zeros after a point change no value, further digits none of a beginning that rounds to one double already, and an
    exponent may have any number of digits.
    """
    mantissa, exponent, _ = text.lower().partition("e")
    if exponent or "." not in mantissa:
        return mantissa
    least = Fraction(mantissa.removesuffix("."))
    most = least + Fraction((-1 if mantissa.startswith("-") else 1), 10 ** (len(mantissa.partition(".")[2])))
    return f"={float(least)}" if float(least) == float(most) else mantissa.rstrip("0")


@lru_cache(maxsize=4096)
def _rounding_to(double: float) -> tuple[str, str, bool]:
    """Return the digits of the least and of the greatest number that rounds to a positive double, without their scale.

    The third value says whether the greatest has one digit more before its point: it begins with 1, the least with 9.
    """
    exact, half = Fraction(double), Fraction(math.ulp(double)) / 2
    below = (exact + Fraction(math.nextafter(double, 0.0))) / 2
    least, most = (
        Context(prec=_COMPARED_DIGITS, rounding=rounding).divide(Decimal(bound.numerator), Decimal(bound.denominator))
        for bound, rounding in ((below, ROUND_FLOOR), (exact + half, ROUND_CEILING))
    )
    return _padded_digits(least), _padded_digits(most), least.adjusted() != most.adjusted()


def _padded_digits(value: Decimal) -> str:
    return "".join(map(str, value.as_tuple().digits)).ljust(_COMPARED_DIGITS, "0")


def _double(value: int | float) -> float:
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else -float("inf")

"""Expressions for JSON numbers within a bound: digits with decimals, or one digit with decimals and an exponent."""

from decimal import Decimal

_DECIMALS = r"(?:\.[0-9]+)?"
_WHOLE = "(?:0|[1-9][0-9]*)"
INTEGER = f"-?{_WHOLE}"
NUMBER = f"-?{_WHOLE}{_DECIMALS}(?:[eE][+-]?[0-9]+)?"
_MOST_EXPONENT = 300  # of numbers between bounds; a double has up to 308
_ZERO_DECIMALS = r"(?:\.0+)?"
_ZERO = rf"0{_ZERO_DECIMALS}(?:[eE][+-]?[0-9]{{1,3}})?"


def at_least(bound: int | float, *, integer: bool, inclusive: bool) -> str:
    """Return an expression for the numbers from ``bound``."""
    value = Decimal(repr(bound))
    if value < 0:
        return f"(?:{_unsigned(integer)}|-{_up_to(-value, integer, inclusive)})"
    minus_zero = [f"-{_zero(integer)}"] if value == 0 and inclusive else []
    return f"(?:{'|'.join([_from(value, integer, inclusive), *minus_zero])})"


def at_most(bound: int | float, *, integer: bool, inclusive: bool) -> str:
    """Return an expression for the numbers up to ``bound``."""
    value = Decimal(repr(bound))
    if value < 0:
        return f"-{_from(-value, integer, inclusive)}"
    negative = f"-{_unsigned(integer)}" if value or inclusive else f"-{_from(Decimal(0), integer, False)}"
    return f"(?:{negative}|{_up_to(value, integer, inclusive)})" if value or inclusive else negative


def _unsigned(integer: bool) -> str:
    return _WHOLE if integer else f"(?:{_WHOLE}{_DECIMALS}|{_scientific(-_MOST_EXPONENT, _MOST_EXPONENT)}|{_ZERO})"


def _zero(integer: bool) -> str:
    return "0" if integer else _ZERO


def _from(bound: Decimal, integer: bool, inclusive: bool) -> str:
    """Return an expression for the numbers from ``bound``, which is not negative, without a sign."""
    whole, decimals = _parts(bound)
    more = _whole_from(int(whole) + 1)
    if integer:
        return f"(?:{whole}|{more})" if inclusive and not decimals else f"(?:{more})"
    ways = [f"{whole}{_decimals_from(decimals, inclusive)}", f"(?:{more}){_DECIMALS}"]
    if not bound:
        ways += [_scientific(-_MOST_EXPONENT, _MOST_EXPONENT), *([_ZERO] if inclusive else [])]
        return f"(?:{'|'.join(ways)})"
    digits, exponent = _normalized(bound)
    ways.append(f"{digits[0]}{_decimals_from(digits[1:], inclusive)}{_exponent(exponent, exponent)}")
    if digits[0] < "9":
        ways.append(f"[{int(digits[0]) + 1}-9]{_DECIMALS}{_exponent(exponent, exponent)}")
    return f"(?:{'|'.join([*ways, *_some(_scientific(exponent + 1, _MOST_EXPONENT))])})"


def _up_to(bound: Decimal, integer: bool, inclusive: bool) -> str:
    """Return an expression for the numbers up to ``bound``, which is not negative, without a sign."""
    whole, decimals = _parts(bound)
    less = _whole_up_to(int(whole) - 1)
    last = _decimals_up_to(decimals, inclusive)
    if integer:
        return f"(?:{'|'.join([*_some(less), *([whole] if decimals or inclusive else [])])})"
    ways = [*([f"(?:{less}){_DECIMALS}"] if less else []), *([f"{whole}{last}"] if last is not None else [])]
    if bound or inclusive:
        ways.append(_ZERO)
    if bound:
        digits, exponent = _normalized(bound)
        last = _decimals_up_to(digits[1:], inclusive)
        ways += [f"{digits[0]}{last}{_exponent(exponent, exponent)}"] if last is not None else []
        if digits[0] > "1":
            ways.append(f"[1-{int(digits[0]) - 1}]{_DECIMALS}{_exponent(exponent, exponent)}")
        ways += _some(_scientific(-_MOST_EXPONENT, exponent - 1))
    return f"(?:{'|'.join(ways)})"


def _parts(bound: Decimal) -> tuple[str, str]:
    """Return the digits before the point, and those after it without zeros at the end."""
    whole, _, decimals = f"{bound:f}".partition(".")
    return whole, decimals.rstrip("0")


def _normalized(bound: Decimal) -> tuple[str, int]:
    """Return the digits of a positive number without zeros at the end, and the exponent of the first one."""
    return "".join(map(str, bound.normalize().as_tuple().digits)), bound.adjusted()


def _decimals_from(digits: str, inclusive: bool) -> str:
    """Return an expression for a point and decimals that are at least ``digits``."""
    if not digits:
        return _DECIMALS if inclusive else r"\.[0-9]*[1-9][0-9]*"
    after = "[0-9]*" if inclusive else "[0-9]*[1-9][0-9]*"
    for digit in reversed(digits):
        more = f"|[{int(digit) + 1}-9][0-9]*" if digit < "9" else ""
        after = f"(?:{digit}{after}{more})"
    return rf"\.{after}"


def _decimals_up_to(digits: str, inclusive: bool) -> str | None:
    """Return an expression for a point and decimals that are at most ``digits``, or nothing; None if none are."""
    if not digits:
        return _ZERO_DECIMALS if inclusive else None
    after: str | None = "0*" if inclusive else None
    for digit in reversed(digits):
        ways = [f"{digit}{after}"] if after is not None else []
        if digit > "0":
            ways.append(f"[0-{int(digit) - 1}][0-9]*")
        after = f"(?:{'|'.join(ways)})?"
    return rf"(?:\.{after.removesuffix('?')})?" if after else None


def _whole_from(least: int) -> str:
    """Return an expression for the whole numbers from ``least``, which is positive."""
    digits = str(least)
    return f"{_same_length(digits, '9' * len(digits))}|[1-9][0-9]{{{len(digits)},}}"


def _whole_up_to(most: int) -> str:
    """Return an expression for the whole numbers from 0 to ``most``; empty if there are none."""
    if most < 0:
        return ""
    digits = str(most)
    shorter = [f"[1-9][0-9]{{0,{len(digits) - 2}}}", "0"] if len(digits) > 1 else []
    return "|".join([_same_length("1" + "0" * (len(digits) - 1) if len(digits) > 1 else "0", digits), *shorter])


def _same_length(low: str, high: str) -> str:
    """Return an expression for the numbers from ``low`` to ``high``, which have as many digits."""
    if low == high:
        return low
    rest = len(low) - 1
    if low[0] == high[0]:
        return low[0] + _same_length(low[1:], high[1:])
    first, last, ways = int(low[0]), int(high[0]), []
    if low[1:] != "0" * rest:
        ways.append(low[0] + _same_length(low[1:], "9" * rest))
        first += 1
    if high[1:] != "9" * rest:
        ways.append(high[0] + _same_length("0" * rest, high[1:]))
        last -= 1
    if first <= last:
        ways.append(f"[{first}-{last}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return f"(?:{'|'.join(ways)})"


def _scientific(low: int, high: int) -> str:
    """Return an expression for the numbers with an exponent from ``low`` to ``high``; empty if there are none."""
    return f"[1-9]{_DECIMALS}{_exponent(low, high)}" if low <= high else ""


def _exponent(low: int, high: int) -> str:
    """Return an expression for the exponents from ``low`` to ``high``; one digit may follow a zero."""
    ways = []
    if low < 0:
        ways.append(f"-{_exponent_digits(max(1, -high), -low)}")
    if high >= 0:
        ways.append(f"[+]?{_exponent_digits(max(0, low), high)}")
    if low <= 0 <= high:
        ways.append("-00?")
    return f"[eE](?:{'|'.join(ways)})"


def _exponent_digits(low: int, high: int) -> str:
    ways = []
    for size in range(len(str(low)), len(str(high)) + 1):
        least, most = max(low, 10 ** (size - 1) if size > 1 else 0), min(high, 10**size - 1)
        ways.append(("0?" if size == 1 else "") + _same_length(str(least), str(most)))
    return f"(?:{'|'.join(ways)})"


def _some(expression: str) -> list[str]:
    return [expression] if expression else []

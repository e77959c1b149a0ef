"""Expressions for bounded JSON numbers match exactly the numbers within the bound, in the spellings that they allow."""

import operator
import re
from decimal import Decimal
from itertools import product

import pytest

from tandemrt.runtime.grammars.regex.json_number import INTEGER, NUMBER, at_least, at_most

WHOLE = ["0", "1", "2", "9", "10", "11", "19", "20", "99", "100", "101", "109", "199", "200", "999", "1000", "1234"]
DIGITS = [*WHOLE, "0.0", "0.00", "0.05", "0.5", "0.50", "0.9", "1.0", "1.5", "2.25", "9.9", "10.0", "99.5", "1234.5"]
SPELLINGS = [
    f"{sign}{digits}{exponent}"
    for sign, digits, exponent in product(("", "-"), DIGITS, ("", "e0", "E1", "e+2", "e-1", "e-3", "e20"))
    if not exponent or float(digits) == 0 or re.fullmatch(r"[1-9](\.[0-9]+)?", digits)  # one digit before the point
]
BOUNDS = [0, 1, 2, 5, 9, 10, 11, 20, 99, 100, 109, 110, 199, 0.05, 0.5, 0.9, 1.5, 2.25, 99.5, 1e20, 1e-7, 123456789]
WITHIN = {
    (at_least, True): operator.ge,
    (at_least, False): operator.gt,
    (at_most, True): operator.le,
    (at_most, False): operator.lt,
}


@pytest.mark.parametrize("bound", [*BOUNDS, *(-bound for bound in BOUNDS)])
def test_a_number_matches_if_it_is_within_the_bound(bound: float) -> None:
    for (expression, inclusive), within in WITHIN.items():
        for integer in (False, True):
            pattern = re.compile(expression(bound, integer=integer, inclusive=inclusive))
            spellings = [text for text in SPELLINGS if re.fullmatch(INTEGER if integer else NUMBER, text)]
            wrong = [
                text
                for text in spellings
                if bool(pattern.fullmatch(text)) != within(Decimal(text), Decimal(repr(bound)))
            ]
            assert not wrong, f"{expression.__name__} {bound}, inclusive {inclusive}, integer {integer}"


@pytest.mark.parametrize("text", ["", "-", "01", "1.", ".5", "1e", "+1", "1.5e+"])
def test_a_text_that_is_no_json_number_does_not_match(text: str) -> None:
    patterns = [at_least(-5, integer=False, inclusive=True), at_most(5, integer=False, inclusive=True), NUMBER]
    assert not any(re.fullmatch(pattern, text) for pattern in patterns)

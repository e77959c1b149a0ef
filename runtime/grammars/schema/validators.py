"""Validators of the package jsonschema that read patterns and numbers as the grammar does.

Patterns are those of ECMA-262, and decimals are exact: 1.15 is a multiple of 0.01. A value that ``read_exactly`` read
keeps the digits of its text.
"""

import json
import operator
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import cache, partial
from typing import Any

import jsonschema

from tandemrt.engines.text import formats
from tandemrt.runtime.grammars.regex.python_form import is_pattern, python_form
from tandemrt.runtime.grammars.schema.dialect import DIALECTS


class WrittenNumber(float):
    """A number with the digits of its text, most of which a double may not hold."""

    def __new__(cls, text: str) -> "WrittenNumber":
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def read_exactly(text: str) -> Any:
    """Parse JSON. Raises ValueError."""
    return json.loads(text, parse_float=WrittenNumber)


@cache
def validator_of(dialect: str, *, newer: bool = False) -> type[jsonschema.protocols.Validator]:
    """Return the validator of a dialect.

    ``newer``: draft-04 with the keywords of newer drafts that it lacks.
    """
    extend: Any = jsonschema.validators.extend
    bounds = {"minimum": operator.ge, "maximum": operator.le}
    rules: dict[str, Any] = {name: partial(_bound, name, holds) for name, holds in bounds.items()}
    rules |= {"pattern": _search, "multipleOf": _multiple}
    if dialect != "draft-04" or newer:
        exclusive = {"exclusiveMinimum": operator.gt, "exclusiveMaximum": operator.lt}
        rules |= {name: partial(_bound, name, holds) for name, holds in exclusive.items()}
    if dialect == "draft-04":
        rules |= {name: partial(_draft4_bound, name) for name in bounds}
        newest = jsonschema.Draft202012Validator.VALIDATORS
        more = ("const", "propertyNames", "dependentRequired", "dependentSchemas", "if")
        rules |= {name: newest[name] for name in more} if newer else {}
    extended: type[jsonschema.protocols.Validator] = extend(DIALECTS[dialect], rules)
    return extended


@cache
def format_checker(dialect: str) -> jsonschema.FormatChecker:
    """Return the checker of a dialect's formats. It also takes what a grammar writes as one of them."""
    checker = jsonschema.FormatChecker(())
    checker.checkers = {
        name: (partial(_has_format, name, check), errors)
        for name, (check, errors) in DIALECTS[dialect].FORMAT_CHECKER.checkers.items()
    }
    return checker


def _has_format(name: str, check: Callable[[object], bool], value: object) -> bool:
    if not isinstance(value, str):
        return True
    if name == "regex":
        return is_pattern(value)
    written = formats.PATTERNS.get(name)
    return (written is not None and re.search(python_form(f"^({written})$"), value) is not None) or check(value)


def _search(validator: Any, pattern: str, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    for _ in jsonschema.Draft202012Validator.VALIDATORS["pattern"](validator, python_form(pattern), value, schema):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _bound(
    keyword: str,
    holds: Callable[[Fraction, Fraction], bool],
    validator: Any,
    bound: Any,
    value: Any,
    _schema: Any,
) -> Iterator[jsonschema.ValidationError]:
    if isinstance(bound, bool):  # of draft-04, where it belongs to minimum or maximum
        return
    if validator.is_type(value, "number") and not holds(_exact(value), _exact(bound)):
        yield jsonschema.ValidationError(f"{value!r} is not within the {keyword} of {bound!r}")


def _draft4_bound(
    keyword: str, validator: Any, bound: Any, value: Any, schema: Any
) -> Iterator[jsonschema.ValidationError]:
    exclusive = "exclusiveMinimum" if keyword == "minimum" else "exclusiveMaximum"
    strict, loose = (operator.gt, operator.ge) if keyword == "minimum" else (operator.lt, operator.le)
    yield from _bound(keyword, strict if schema.get(exclusive) is True else loose, validator, bound, value, schema)


def _multiple(validator: Any, step: Any, value: Any, _schema: Any) -> Iterator[jsonschema.ValidationError]:
    if validator.is_type(value, "number") and _exact(value) % _exact(step):
        yield jsonschema.ValidationError(f"{value!r} is not a multiple of {step!r}")


def _exact(number: int | float) -> Fraction:
    return Fraction(number.text if isinstance(number, WrittenNumber) else json.dumps(number))

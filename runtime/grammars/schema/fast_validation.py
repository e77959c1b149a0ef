"""A fast test that a schema is valid in its dialect, because validation with the metaschema is slow.

A schema that fails the test may still be valid; the metaschema decides then, and gives the error message.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tandemrt.runtime.grammars.regex.parser import read
from tandemrt.runtime.grammars.regex.syntax import UnsupportedPattern

_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_LISTS_OF_ITEMS = ("draft-04", "draft-06", "draft-07", "2019-09")


def is_plain(schema: Any, dialect: str) -> bool:
    """Return whether all keywords of the schema and its subschemas have a valid form."""
    draft4 = dialect == "draft-04"
    if draft4 and not isinstance(schema, dict):
        return False
    pending = [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, bool):
            continue
        if not isinstance(one, dict):
            return False
        for keyword, value in one.items():
            if keyword in _FORMS and not _FORMS[keyword](value, draft4):
                return False
            if keyword == "items" and isinstance(value, list) and dialect not in _LISTS_OF_ITEMS:
                return False
            within = list(_within(keyword, value))
            allows_bools = not draft4 or keyword in ("additionalProperties", "additionalItems")
            if not allows_bools and not all(isinstance(child, dict) for child in within):
                return False
            pending += within
    return True


def _within(keyword: str, value: Any) -> Iterator[Any]:
    if keyword in _MAPS:
        yield from (value.values() if isinstance(value, dict) else [None])
    elif keyword == "dependencies":
        for needs in value.values() if isinstance(value, dict) else [None]:
            if not (isinstance(needs, list) and _texts(needs, True)):
                yield needs
    elif keyword in _LISTS or (keyword == "items" and isinstance(value, list)):
        yield from (value if isinstance(value, list) and value else [None])
    elif keyword in _SINGLE:
        yield value


def _text(value: Any, _: bool) -> bool:
    return isinstance(value, str)


def _plain_text(pattern: str, value: Any, _: bool) -> bool:
    return isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _number(value: Any, _: bool) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _exclusive(value: Any, draft4: bool) -> bool:
    return not draft4 and _number(value, draft4)  # in draft-04 it is a flag that needs its bound


def _count(value: Any, _: bool) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _flag(value: Any, _: bool) -> bool:
    return isinstance(value, bool)


def _texts(value: Any, _: bool) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(text, str) for text in value) and _once(value)


def _once(values: list[Any]) -> bool:
    return len({(value, isinstance(value, bool)) for value in values}) == len(values)  # true is not 1, but 1.0 is


def _type(value: Any, draft4: bool) -> bool:
    kinds = [value] if isinstance(value, str) else value
    return _texts(kinds, draft4) and _TYPES.issuperset(kinds)


def _enum(value: Any, _: bool) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_simple, value)) and _once(value)


def _simple(value: Any) -> bool:
    """Return whether repetitions of the value are fast to find.

    Below 2**60 about a hundred numbers at most have one hash (floats m * 2**(-61 * j)), and any number beyond.
    """
    return value is None or isinstance(value, str) or (isinstance(value, int | float) and abs(value) < 2**60)


def _pattern(value: Any, _: bool) -> bool:
    if not isinstance(value, str):
        return False
    try:
        read(value)
    except UnsupportedPattern:
        return False
    return True


def _patterns(value: Any, _: bool) -> bool:
    return isinstance(value, dict) and all(_pattern(key, True) for key in value)


def _needs(value: Any, _: bool) -> bool:
    return isinstance(value, dict) and all(_texts(names, True) for names in value.values())


_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_SINGLE = frozenset(
    {"additionalProperties", "additionalItems", "items", "not", "if", "then", "else", "contains", "propertyNames"}
    | {"unevaluatedItems", "unevaluatedProperties", "contentSchema"}
)
_ANCHOR = partial(_plain_text, "[A-Za-z_][A-Za-z0-9_.-]*")
_FORMS: dict[str, Callable[[Any, bool], bool]] = {
    **dict.fromkeys(("title", "description", "$comment", "$schema", "$ref", "$dynamicRef", "format"), _text),
    **dict.fromkeys(("contentEncoding", "contentMediaType"), _text),
    **dict.fromkeys(("$id", "id"), partial(_plain_text, "[^#]*#?")),
    **dict.fromkeys(("$anchor", "$dynamicAnchor"), _ANCHOR),
    **dict.fromkeys(("minimum", "maximum"), _number),
    **dict.fromkeys(("exclusiveMinimum", "exclusiveMaximum"), _exclusive),
    "multipleOf": lambda value, draft4: _number(value, draft4) and value > 0,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _count),
    **dict.fromkeys(("minContains", "maxContains"), _count),
    **dict.fromkeys(("uniqueItems", "deprecated", "readOnly", "writeOnly"), _flag),
    "type": _type,
    "required": _texts,
    "enum": _enum,
    "pattern": _pattern,
    "patternProperties": _patterns,
    "dependentRequired": _needs,
    "examples": lambda value, _: isinstance(value, list),
    "$vocabulary": lambda *_: False,
    **dict.fromkeys(("$recursiveAnchor", "$recursiveRef"), lambda *_: False),
}

"""Negate a schema: one alternative for each keyword that a value may violate."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

from tandemrt.runtime.grammars.schema.document import Document, Node, UnsupportedSchema
from tandemrt.runtime.grammars.schema.object_intersection import matches_name

TYPES = ("null", "boolean", "number", "string", "array", "object")

_NEGATED_BOUNDS = {
    "minimum": ("number", "exclusiveMaximum", 0),
    "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0),
    "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}

SCHEMAS_OF_NAMES = ("additionalProperties", "patternProperties", "propertyNames")
_ANY_IF_TRUE = (*SCHEMAS_OF_NAMES, "items")  # keywords that True or {} makes valid for every value
_MOST_BRANCHES = 4  # of a oneOf, whose pairs are alternatives


def negated(document: Document, node: Node, names: Collection[str]) -> list[Node]:
    """Return alternatives; a value is valid for at least one of them if and only if it is invalid for ``node``.

    ``names``: all that an object may have; empty: unknown.

    Raises UnsupportedSchema for a keyword without a supported negation, such as one of names if these are unknown.
    """
    if isinstance(node.schema, bool):
        return [] if node.schema else [node.derived({}, "any")]
    ways: list[Node] = []
    for keyword, value in document.keywords(node).items():
        for index, way in enumerate(_ways(document, node, keyword, value, names)):
            ways.append(way if isinstance(way, Node) else node.derived(way, f"not {keyword} {index}"))
    return ways


def _ways(
    document: Document, node: Node, keyword: str, value: Any, names: Collection[str]
) -> Iterator[dict[str, Any] | Node]:
    """Yield the ways in which a value violates one keyword of ``node``."""
    if keyword in _BY_VALUE:
        yield from _BY_VALUE[keyword](value)
    elif keyword in _NEGATED_BOUNDS:
        yield from _of_bound(keyword, value)
    elif keyword in ("const", "enum", "pattern"):
        yield {"not": {keyword: value}}
    elif keyword == "oneOf" and len(value) <= _MOST_BRANCHES:
        yield {"allOf": [{"not": branch} for branch in value]}
        yield from ({"allOf": [*pair]} for pair in combinations(value, 2))
    elif keyword == "not":
        yield node.derived(value, "not not")
    elif keyword == "$ref":
        yield from negated(document, document.resolve(node, value), names)
    elif keyword == "if":
        keywords = document.keywords(node)
        yield {"allOf": [value, {"not": keywords.get("then", True)}]}
        yield {"allOf": [{"not": value}, {"not": keywords.get("else", True)}]}
    elif keyword in SCHEMAS_OF_NAMES and names:
        yield from _of_names(document, node, keyword, value, names)
    elif keyword not in ("then", "else") and not (keyword in _ANY_IF_TRUE and value in (True, {})):
        raise UnsupportedSchema(
            f"{node.place}/{keyword}", "its negation is not supported; say what is allowed instead of what is not"
        )


def _of_bound(keyword: str, value: Any) -> Iterator[dict[str, Any]]:
    kind, complement, more = _NEGATED_BOUNDS[keyword]
    if value + more >= 0 or kind == "number":
        yield {"type": kind, complement: value + more}


def _of_type(value: str | list[str]) -> Iterator[dict[str, Any]]:
    kinds = [value] if isinstance(value, str) else value
    others = [kind for kind in TYPES if kind not in kinds and (kind != "number" or "integer" not in kinds)]
    if others:
        yield {"type": others}
    if "integer" in kinds and "number" not in kinds:
        yield {"type": "number", "not": {"type": "integer"}}


def _with_property(name: str, schema: Any) -> dict[str, Any]:
    """Return objects that have a property, and ``schema`` for its value."""
    return {"type": "object", "required": [name], "properties": {name: schema}}


def _of_dependent_required(value: dict[str, list[str]]) -> Iterator[dict[str, Any]]:
    for name, needs in value.items():
        yield from ({"type": "object", "required": [name], "properties": {need: False}} for need in needs)


# Keywords whose negation depends on their value alone.
_BY_VALUE: Mapping[str, Callable[[Any], Iterable[dict[str, Any]]]] = {
    "type": _of_type,
    "required": lambda names: [{"type": "object", "properties": {name: False}} for name in names],
    "properties": lambda schemas: [_with_property(name, {"not": child}) for name, child in schemas.items()],
    "allOf": lambda branches: [{"not": branch} for branch in branches],
    "anyOf": lambda branches: [{"allOf": [{"not": branch} for branch in branches]}],
    "dependentSchemas": lambda schemas: [
        {"type": "object", "required": [name], "not": child} for name, child in schemas.items()
    ],
    "dependentRequired": _of_dependent_required,
}


def _of_names(
    document: Document, node: Node, keyword: str, value: Any, names: Collection[str]
) -> Iterator[dict[str, Any]]:
    """Yield objects with one of ``names`` that violates the keyword."""
    keywords = document.keywords(node)
    for name in names:
        if keyword == "propertyNames":
            if not document.is_valid(document.child(node, value, keyword), name):
                yield {"type": "object", "required": [name]}
            continue
        matching = [pattern for pattern in keywords.get("patternProperties", {}) if matches_name(pattern, name, node)]
        if keyword == "patternProperties":
            for pattern in matching:
                yield _with_property(name, {"not": value[pattern]})
        elif name not in keywords.get("properties", {}) and not matching:
            yield _with_property(name, {"not": value})

"""Negate a schema: one alternative for each keyword that a value may violate."""

from collections.abc import Iterator
from typing import Any

from tandemrt.runtime.grammars.schema.document import Document, Node, UnsupportedSchema

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


def negated(document: Document, node: Node) -> list[Node]:
    """Return alternatives; a value is valid for at least one of them if and only if it is invalid for ``node``.

    Raises UnsupportedSchema for a keyword without a supported negation.
    """
    if isinstance(node.schema, bool):
        return [] if node.schema else [node.derived({}, "any")]
    ways: list[Node] = []
    for keyword, value in document.keywords(node).items():
        for index, way in enumerate(_ways(document, node, keyword, value)):
            ways.append(way if isinstance(way, Node) else node.derived(way, f"not {keyword} {index}"))
    return ways


def _ways(document: Document, node: Node, keyword: str, value: Any) -> Iterator[dict[str, Any] | Node]:
    if keyword in _NEGATED_BOUNDS:
        kind, complement, more = _NEGATED_BOUNDS[keyword]
        if value + more >= 0 or kind == "number":
            yield {"type": kind, complement: value + more}
    elif keyword in ("const", "enum", "pattern"):
        yield {"not": {keyword: value}}
    elif keyword == "required":
        yield from ({"type": "object", "properties": {name: False}} for name in value)
    elif keyword == "properties":
        for name, child in value.items():
            yield {"type": "object", "required": [name], "properties": {name: {"not": child}}}
    elif keyword == "not":
        yield node.derived(value, "not not")
    elif keyword == "allOf":
        yield from ({"not": branch} for branch in value)
    elif keyword == "anyOf":
        yield {"allOf": [{"not": branch} for branch in value]}
    elif keyword == "$ref":
        yield from negated(document, document.resolve(node, value))
    elif keyword == "type":
        kinds = [value] if isinstance(value, str) else value
        others = [kind for kind in TYPES if kind not in kinds and (kind != "number" or "integer" not in kinds)]
        if others:
            yield {"type": others}
        if "integer" in kinds and "number" not in kinds:
            yield {"type": "number", "not": {"type": "integer"}}
    else:
        raise UnsupportedSchema(
            f"{node.place}/{keyword}", "its negation is not supported; say what is allowed instead of what is not"
        )

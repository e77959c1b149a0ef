"""Intersect the object keywords of schemas that apply together: each property gets all its schemas."""

import re
from typing import Any

from tandemrt.engines.validation.errors import quoted
from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.syntax import UnsupportedPattern
from tandemrt.runtime.grammars.schema.dialect import OBJECT_KEYWORDS
from tandemrt.runtime.grammars.schema.document import Node, UnsupportedSchema
from tandemrt.runtime.grammars.schema.expansion import Expansion
from tandemrt.runtime.grammars.schema.shapes import ANYTHING, NOTHING, AllOf, Object, String


class ObjectIntersection:
    """The object keywords of nodes that apply together.

    If the expander is ``closed``, objects with ``properties`` or ``patternProperties`` allow no other names unless
    ``additionalProperties`` says so.
    """

    def __init__(self, expander: Expansion, nodes: list[tuple[Node, dict[str, Any]]]) -> None:
        self._expander = expander
        self._document = expander.document
        self._nodes = [(node, keywords) for node, keywords in nodes if not keywords.keys().isdisjoint(OBJECT_KEYWORDS)]
        self._unevaluated = tuple(
            self._document.child(node, keywords["unevaluatedProperties"], "unevaluatedProperties")
            for node, keywords in self._nodes
            if keywords.get("unevaluatedProperties", True) is not True
        )

    def shape(self) -> Object:
        """Return the shape of the object. Raises UnsupportedSchema."""
        nodes = self._nodes
        if self._unevaluated:
            self._require_listed_names_under_not()
        shape = Object({}, [], {}, self._rest())
        for _, keywords in nodes:
            shape.required = list(dict.fromkeys([*shape.required, *keywords.get("required", ())]))
            shape.least = max(shape.least, int(keywords.get("minProperties", 0)))
            if "maxProperties" in keywords:
                most = int(keywords["maxProperties"])
                shape.most = most if shape.most is None else min(shape.most, most)
        names = [name for _, keywords in nodes for name in keywords.get("properties", {})]
        for name in dict.fromkeys(names + shape.required):
            shape.properties[name] = self._property(name)
        for node, keywords in nodes:
            for pattern, child in keywords.get("patternProperties", {}).items():
                written = _read(pattern, node)
                schemas = AllOf(*shape.patterns.get(written, ANYTHING).nodes, *self._pattern(node, pattern, child))
                shape.patterns[written] = schemas
                _reject_shared_names(shape, node.place)
        if shape.rest is not None and shape.patterns:
            self._name_others(shape, shape.rest)
        return shape

    def _require_listed_names_under_not(self) -> None:
        """Raise UnsupportedSchema for names that a schema under ``not`` describes by a pattern, or as all others."""
        for node, keywords in self._nodes:
            keyword = next((key for key in ("patternProperties", "additionalProperties") if key in keywords), None)
            if node.negated and keyword:
                rule = "under not it is not supported together with unevaluatedProperties; use additionalProperties"
                raise UnsupportedSchema(f"{node.place}/{keyword}", rule)

    def _is_evaluated(self, name: str) -> bool:
        """Return whether a schema describes a property; ``unevaluatedProperties`` applies to the others."""
        return any(
            name in keywords.get("properties", {})
            or "additionalProperties" in keywords
            or any(matches_name(pattern, name, node) for pattern in keywords.get("patternProperties", {}))
            for node, keywords in self._nodes
            if not node.negated
        )

    def _name_others(self, shape: Object, rest: AllOf) -> None:
        """Replace ``rest`` by a pattern of the names that match no other pattern and are no property of other schemas.

        With ``rest``, llguidance would accept names of the other patterns in an escaped form.
        """
        expressions = [pattern for _, keywords in self._nodes for pattern in keywords.get("patternProperties", {})]
        place = f"{self._nodes[0][0].place}/patternProperties"
        expressions += [
            f"^{_escaped(name)}$" for name, all_of in shape.properties.items() if not rest.key <= all_of.key
        ]
        others = self._expander.complement(list(dict.fromkeys(expressions)), place)
        if others is not None:
            shape.patterns[others] = rest
        shape.rest = None

    def name_schemas(self) -> AllOf:
        """Return the ``propertyNames`` schemas."""
        return AllOf(
            *(
                self._document.child(node, keywords["propertyNames"], "propertyNames")
                for node, keywords in self._nodes
                if keywords.get("propertyNames", True) is not True
            )
        )

    def _rest(self) -> AllOf | None:
        schemas = [
            self._document.child(node, keywords["additionalProperties"], "additionalProperties")
            for node, keywords in self._nodes
            if "additionalProperties" in keywords
        ]
        schemas = schemas or [*self._unevaluated]
        if schemas:
            all_of = AllOf(*schemas)
            return None if all_of.is_nothing() else all_of
        described = (
            not node.condition and (keywords.get("properties") or keywords.get("patternProperties"))
            for node, keywords in self._nodes
        )
        return None if self._expander.closed and any(described) else ANYTHING

    def _property(self, name: str) -> AllOf:
        schemas: list[Node] = []
        for node, keywords in self._nodes:
            own = []
            if name in keywords.get("properties", {}):
                own.append(self._document.child(node, keywords["properties"][name], "properties", name))
            for pattern, child in keywords.get("patternProperties", {}).items():
                if matches_name(pattern, name, node):
                    own.append(self._document.child(node, child, "patternProperties", pattern))
            if not own and "additionalProperties" in keywords:
                own.append(self._document.child(node, keywords["additionalProperties"], "additionalProperties"))
            schemas += own
        return AllOf(*schemas, *(() if self._is_evaluated(name) else self._unevaluated))

    def _pattern(self, node: Node, pattern: str, child: Any) -> list[Node]:
        """Return the schemas that apply to names that match ``pattern`` and are in no node's ``properties``."""
        schemas = [self._document.child(node, child, "patternProperties", pattern)]
        for other, keywords in self._nodes:
            more = keywords.get("additionalProperties", True)
            if other == node or more is True or pattern in keywords.get("patternProperties", {}):
                continue
            if keywords.get("patternProperties"):
                raise UnsupportedSchema(
                    f"{other.place}/patternProperties",
                    f"together with {quoted(pattern)} of another schema it is not supported; merge them",
                )
            schemas.append(self._document.child(other, more, "additionalProperties"))
        return schemas


def with_names(shape: Object, names: String | list[str], place: str) -> Object:
    """Return ``shape`` with additional names only where ``names`` allows them. Raises UnsupportedSchema."""
    if shape.rest is None and not shape.patterns:
        return shape
    if isinstance(names, list):
        for name in names:
            if name not in shape.properties:
                schemas = [all_of for key, all_of in shape.patterns.items() if patterns.matches(key, name)]
                if schemas or shape.rest is not None:
                    shape.properties[name] = AllOf(
                        *(node for all_of in schemas or [shape.rest or NOTHING] for node in all_of.nodes)
                    )
        shape.patterns, shape.rest = {}, None
        return shape
    limits = f"(?s:.){{{names.least},{'' if names.most is None else names.most}}}"
    if shape.patterns or len(names.patterns) > 1 or (names.patterns and limits != "(?s:.){0,}"):
        raise UnsupportedSchema(
            f"{place}/propertyNames", "more than one rule for the same names is not supported; write one pattern"
        )
    shape.patterns = {(names.patterns or [limits])[0]: shape.rest or NOTHING}
    shape.rest = None
    _reject_shared_names(shape, place)
    return shape


def _reject_shared_names(shape: Object, place: str) -> None:
    """Raise UnsupportedSchema if a pattern has schemas that do not apply to a property whose name it matches.

    llguidance applies the schemas of a matching pattern to properties, too.
    """
    for name, all_of in shape.properties.items():
        for pattern, schemas in shape.patterns.items():
            if all_of.is_nothing() or schemas.key <= all_of.key or not patterns.matches(pattern, name):
                continue
            raise UnsupportedSchema(
                f"{place}/properties",
                f"additionalProperties together with a pattern that matches {quoted(name)} is not supported; "
                "merge the schemas of this name",
            )


def _escaped(name: str) -> str:
    return re.sub(r"[\^$\\.*+?()\[\]{}|/]", r"\\\g<0>", name)


def _read(pattern: str, node: Node) -> str:
    try:
        return patterns.search_expression(pattern)
    except UnsupportedPattern as error:
        raise UnsupportedSchema(
            f"{node.place}/patternProperties", f"{quoted(pattern)}: {error} is not supported"
        ) from None


def matches_name(pattern: str, name: str, node: Node) -> bool:
    """Return whether a pattern of ``node`` matches the name of a property. Raises UnsupportedSchema."""
    written = _read(pattern, node)
    try:
        return patterns.matches(written, name)
    except UnsupportedPattern as error:
        raise UnsupportedSchema(f"{node.place}/patternProperties", f"{error} is not supported") from None

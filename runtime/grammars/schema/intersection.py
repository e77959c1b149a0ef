"""Intersect schemas that contain no references and no choices: one shape per JSON type."""

import json
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

from tandemrt.engines.text import formats
from tandemrt.engines.validation.errors import quoted
from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.regex.syntax import UnsupportedPattern
from tandemrt.runtime.grammars.schema.dialect import MAX_NUMBER_BITS
from tandemrt.runtime.grammars.schema.document import Node, UnsupportedSchema
from tandemrt.runtime.grammars.schema.expansion import Expansion
from tandemrt.runtime.grammars.schema.negation import TYPES
from tandemrt.runtime.grammars.schema.object_intersection import ObjectIntersection, with_names
from tandemrt.runtime.grammars.schema.shapes import (
    ANYTHING,
    NOTHING,
    AllOf,
    Array,
    Literals,
    Number,
    Object,
    Plain,
    Shape,
    String,
    common_multiple,
    remainders,
)  # fmt: skip

_EXCLUDING = frozenset({"const", "enum", "pattern"})
LARGEST_EXACT = 2**53  # the engine reads numbers as doubles
MAX_REMAINDERS = 10_000  # states of the engine's automaton of multiples, which has no limit of its own


class Intersection:
    """The intersection of nodes that contain no references and no choices."""

    def __init__(self, expander: Expansion, nodes: list[Node]) -> None:
        self._expander = expander
        self._document = expander.document
        self._nodes = [(node, self._document.keywords(node)) for node in nodes]

    def shapes(self) -> Iterator[Shape]:
        """Yield the alternative shapes. Raises UnsupportedSchema."""
        types, integer = self._types()
        excluded = [value for _, keywords in self._nodes for value in _excluded(keywords)]
        if "null" in types and None not in excluded:
            yield Plain("null")
        if "boolean" in types:
            truths = [truth for truth in (True, False) if not any(truth is value for value in excluded)]
            if len(truths) == 2:
                yield Plain("boolean")
            elif truths:
                yield Literals(truths)
        if "number" in types:
            yield from self._numbers(integer, [value for value in excluded if is_number(value)])
        if "string" in types:
            yield from self._string([value for value in excluded if isinstance(value, str)])
        compound = [value for value in excluded if isinstance(value, list | dict)]
        if "array" in types:
            self._reject_excluded(compound, list)
            yield self._array()
        if "object" in types:
            self._reject_excluded(compound, dict)
            yield self._object()

    def _types(self) -> tuple[list[str], bool]:
        types, integer = list(TYPES), False
        for _, keywords in self._nodes:
            if "type" in keywords:
                kinds = [keywords["type"]] if isinstance(keywords["type"], str) else keywords["type"]
                if "integer" in kinds and "number" not in kinds:
                    integer = True
                    kinds = [*kinds, "number"]
                types = [kind for kind in types if kind in kinds]
            if "pattern" in _inside_not(keywords):  # `pattern` accepts values of other types, so `not` rejects them
                types = [kind for kind in types if kind == "string"]
        return types, integer

    def _numbers(self, integer: bool, excluded: list[int | float]) -> Iterator[Number]:
        for node, keywords in self._nodes:
            if "type" in _inside_not(keywords):
                if integer:
                    return
                raise UnsupportedSchema(f"{node.place}/not", "excluding integers is not supported; leave it out")
        low, high, above, below = (
            self._bound(key) for key in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        )
        multiples = [_fraction(keywords["multipleOf"]) for _, keywords in self._nodes if "multipleOf" in keywords]
        self._require_few_remainders(multiples)
        holes = sorted({_fraction(value) for value in excluded})
        for after, before in zip([None, *holes], [*holes, None], strict=True):
            shape = Number(
                integer,
                low,
                high,
                max([bound for bound in (above, after) if bound is not None], default=None),
                min([bound for bound in (below, before) if bound is not None], default=None),
                list(dict.fromkeys(multiples)),
            )
            if not shape.is_empty():
                yield shape

    def _require_few_remainders(self, multiples: list[Fraction]) -> None:
        step = common_multiple(multiples)
        if step is None or (step.numerator < 2**MAX_NUMBER_BITS and remainders(step) <= MAX_REMAINDERS):
            return
        nodes = [(node, keywords["multipleOf"]) for node, keywords in self._nodes if "multipleOf" in keywords]
        raise UnsupportedSchema(
            f"{nodes[0][0].place}/multipleOf",
            f"the least common multiple must be at most {MAX_REMAINDERS} without the zeros at its end, got "
            f"{', '.join(quoted(multiple) for _, multiple in nodes[:3])}; use a smaller multipleOf",
        )

    def _bound(self, keyword: str) -> Fraction | None:
        bounds = [_fraction(keywords[keyword]) for _, keywords in self._nodes if keyword in keywords]
        if not bounds:
            return None
        return max(bounds) if keyword.lower().endswith("minimum") else min(bounds)

    def _string(self, excluded: list[str]) -> Iterator[String]:
        shape = String()
        for node, keywords in self._nodes:
            shape.least = max(shape.least, _count(keywords.get("minLength", 0)))
            if "maxLength" in keywords:
                shape.most = _least(shape.most, _count(keywords["maxLength"]))
            if "pattern" in keywords:
                try:
                    rest, required, forbidden = patterns.split_conditions(keywords["pattern"])
                    shape.patterns += map(patterns.search_expression, [*required, rest])
                    complement = self._expander.complement(forbidden, f"{node.place}/pattern") if forbidden else ""
                except (UnsupportedPattern, UnsupportedSchema) as error:
                    if self._expander.loose:
                        continue
                    if isinstance(error, UnsupportedSchema):
                        raise
                    raise UnsupportedSchema(
                        f"{node.place}/pattern", f"{error} is not supported; rewrite the pattern without it"
                    ) from None
                if complement is None:
                    return
                shape.patterns += [complement] if forbidden else []
            if "pattern" in _inside_not(keywords):
                complement = self._expander.complement([keywords["not"]["pattern"]], f"{node.place}/not/pattern")
                if complement is None:
                    return
                shape.patterns.append(complement)
            if "format" in keywords:
                self._format(shape, node, keywords["format"])
        shape.patterns = list(dict.fromkeys(shape.patterns))
        if excluded:
            try:
                shape.patterns.append(patterns.other_than(excluded))
            except UnsupportedPattern as error:
                raise UnsupportedSchema(f"{self._nodes[0][0].place}/not", f"{error} is not supported") from None
        if shape.most is None or shape.least <= shape.most:
            yield shape

    def _format(self, shape: String, node: Node, name: str) -> None:
        if name in formats.PATTERNS:
            shape.patterns.append(patterns.fullmatch_expression(formats.PATTERNS[name]))
            if name in formats.LONGEST:
                shape.most = _least(shape.most, formats.LONGEST[name])
        elif self._expander.loose:
            return
        elif name in formats.UNSUPPORTED:
            raise UnsupportedSchema(
                f"{node.place}/format", f"{quoted(name)} is not supported; leave it out or write a pattern"
            )

    def _array(self) -> Array:
        length = max((len(keywords.get("prefixItems", ())) for _, keywords in self._nodes), default=0)
        shape = Array([self._item(index) for index in range(length)], self._item(None))
        for node, keywords in self._nodes:
            shape.least = max(shape.least, _count(keywords.get("minItems", 0)))
            if "maxItems" in keywords:
                shape.most = _least(shape.most, _count(keywords["maxItems"]))
            shape.unique |= bool(keywords.get("uniqueItems"))
            if keywords.get("contains") in (True, {}) and isinstance(node.schema, dict):
                shape.least = max(shape.least, _count(node.schema.get("minContains", 1)))
        return shape

    def _object(self) -> Object:
        objects = ObjectIntersection(self._expander, self._nodes)
        shape, names = objects.shape(), objects.name_schemas()
        if names.nodes:
            for name in shape.properties:
                if not all(self._document.is_valid(node, name) for node in names.nodes):
                    shape.properties[name] = NOTHING
            place = self._nodes[0][0].place
            shape = with_names(shape, [] if names.is_nothing() else self._expander.names(names, place), place)
        return shape

    def _item(self, index: int | None) -> AllOf:
        """Return the schemas of the item at ``index``, or of the items after all prefix items for None."""
        nodes = []
        for node, keywords in self._nodes:
            places = keywords.get("prefixItems", ())
            if index is not None and index < len(places):
                key = "prefixItems" if isinstance(node.schema, dict) and "prefixItems" in node.schema else "items"
                nodes.append(self._document.child(node, places[index], key, index))
            elif "items" in keywords:
                assert isinstance(node.schema, dict)
                key = "additionalItems" if isinstance(node.schema.get("items"), list) else "items"
                nodes.append(self._document.child(node, keywords["items"], key))
        if not self._is_evaluated(index):
            for node, keywords in self._nodes:
                if keywords.get("unevaluatedItems", True) is not True:
                    nodes.append(self._document.child(node, keywords["unevaluatedItems"], "unevaluatedItems"))
        return AllOf(*nodes) if nodes else ANYTHING

    def _is_evaluated(self, index: int | None) -> bool:
        """Return whether a schema describes the item at ``index``; ``unevaluatedItems`` applies to the others."""
        return any(
            "items" in keywords or (index is not None and index < len(keywords.get("prefixItems", ())))
            for node, keywords in self._nodes
            if not node.negated
        )

    def _reject_excluded(self, excluded: list[Any], kind: type) -> None:
        if any(isinstance(value, kind) for value in excluded):
            raise UnsupportedSchema(
                f"{self._nodes[0][0].place}/not", "a list or an object is not supported as an excluded value"
            )


def exact(value: Any) -> bool:
    """Return whether the engine reads all numbers of a literal exactly."""
    if isinstance(value, dict):
        return all(map(exact, value.values()))
    if isinstance(value, list):
        return all(map(exact, value))
    return not isinstance(value, int | float) or abs(value) <= LARGEST_EXACT  # false for nan


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def excludes_only(keywords: dict[str, Any]) -> bool:
    """Return whether the schema under ``not`` has only ``const``, ``enum``, ``pattern`` or the type integer."""
    return len(keywords) == 1 and (not keywords.keys().isdisjoint(_EXCLUDING) or keywords.get("type") == "integer")


def _excluded(keywords: dict[str, Any]) -> list[Any]:
    inner = _inside_not(keywords)
    return [inner["const"]] if "const" in inner else list(inner.get("enum", ()))


def _inside_not(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the schema under ``not`` (see ``excludes_only``)."""
    inner = keywords.get("not")
    return inner if isinstance(inner, dict) else {}


def _fraction(value: int | float) -> Fraction:
    return Fraction(json.dumps(value))


def _count(value: int | float) -> int:
    return int(value)


def _least(one: int | None, other: int) -> int:
    return other if one is None else min(one, other)

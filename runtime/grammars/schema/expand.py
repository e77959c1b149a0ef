"""Expand a conjunction of schemas into alternative shapes: resolve references and enumerate choices."""

from collections.abc import Iterator
from typing import Any

from tandemrt.engines.validation.errors import NotQuick
from tandemrt.runtime.grammars.regex.complement import complement, complement_size
from tandemrt.runtime.grammars.regex.syntax import UnsupportedPattern
from tandemrt.runtime.grammars.schema import dialect
from tandemrt.runtime.grammars.schema.disjoint import Disjoint
from tandemrt.runtime.grammars.schema.document import Document, Node, UnsupportedSchema
from tandemrt.runtime.grammars.schema.intersection import Intersection, excludes_only
from tandemrt.runtime.grammars.schema.lowering import plain
from tandemrt.runtime.grammars.schema.negation import SCHEMAS_OF_NAMES, negated
from tandemrt.runtime.grammars.schema.shapes import AllOf, Literals, Ref, Shape, String

MAX_SHAPES = 512  # per place
MAX_STEPS = 20_000  # per schema
COMPLEMENT_STEPS = 50  # minimum cost of a complement of patterns, in steps
NAME_STEPS = 3  # of each name in each alternative of a negation
QUICK_STEPS = 1000  # about 10 ms; larger schemas are converted in a worker process

# Keywords that ``loose`` drops: the finished text is validated against the original schema.
_LOOSE = frozenset({"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "contains", "uniqueItems"})
_LOOSE |= {"propertyNames", "minProperties", "maxProperties", "unevaluatedProperties", "unevaluatedItems"}

Option = tuple[Node, ...]


class Expander:
    """Expand the schemas of one document, and cache the results.

    Args:
        document: the schema to expand.
        closed: objects with ``properties`` allow no other names unless ``additionalProperties`` does.
        loose: drop unsupported keywords, because the finished text is validated.
        quick: raise NotQuick after ``QUICK_STEPS``.
        lowered: return shapes that the engine enforces. Otherwise a shape may fit no value.
    """

    def __init__(
        self,
        document: Document,
        *,
        closed: bool = True,
        loose: bool = False,
        quick: bool = False,
        lowered: bool = True,
    ) -> None:
        self.document = document
        self._quick = quick
        self.closed = closed
        self.loose = loose
        self._known: dict[AllOf, list[Shape]] = {}
        self._alike: dict[AllOf, AllOf] = {}
        self._active: set[AllOf] = set()
        self._steps = 0
        self._lowered = lowered
        self._disjoint = Disjoint(
            self, Expander(document, closed=False, quick=quick, lowered=False) if closed else self
        )

    def canonical(self, all_of: AllOf) -> AllOf:
        """Replace each node that is only a $ref by its target, so that equal conjunctions compare equal."""
        if all_of not in self._alike:
            self._alike[all_of] = AllOf(*(self._followed(node) for node in all_of.nodes))
        return self._alike[all_of]

    def shapes(self, all_of: AllOf) -> list[Shape]:
        """Return the alternative shapes of a conjunction. Raises UnsupportedSchema."""
        if all_of not in self._known:
            if all_of in self._active:
                raise UnsupportedSchema(all_of.nodes[0].place, "only refers to itself; point the reference to a schema")
            self._active.add(all_of)
            try:
                shapes = self._shapes(all_of)
            finally:
                self._active.discard(all_of)
            if len(shapes) > MAX_SHAPES:
                raise UnsupportedSchema(
                    all_of.nodes[0].place, f"more than {MAX_SHAPES} combinations of choices; simplify it"
                )
            self._known[all_of] = shapes
        return self._known[all_of]

    def _followed(self, node: Node) -> Node:
        passed = set()
        while self.document.keywords(node).keys() == {"$ref"}:
            self._check(node)
            if node in passed:
                raise UnsupportedSchema(f"{node.place}/$ref", "only refers to itself; point it to a schema")
            passed.add(node)
            assert isinstance(node.schema, dict)
            node = self.document.resolve(node, node.schema["$ref"])
        return node

    def _shapes(self, all_of: AllOf) -> list[Shape]:
        nodes: list[Node] = []
        for node in all_of.nodes:
            nodes += self._gathered(node, (), alone=len(all_of.nodes) == 1)
        if any(node.schema is False for node in nodes):
            return []
        for node in nodes:
            keywords = self.document.keywords(node)
            if "const" in keywords or "enum" in keywords:
                keyword = "const" if "const" in keywords else "enum"
                values = [keywords["const"]] if "const" in keywords else keywords["enum"]
                # The values of the list fit the list; skip that check, because the list may be long.
                others = [
                    each.without(keyword) if each.source_name == node.source_name else each for each in all_of.nodes
                ]
                return self._literals(others, values, f"{node.place}/{keyword}")
        for index, node in enumerate(nodes):
            choice = self._choice(node)
            if choice:
                base = AllOf(*nodes[:index], node.without(*choice), *nodes[index + 1 :])
                return list(self._options(base, node, choice[0]))
        place = all_of.nodes[0].place if all_of.nodes else "#"
        return [shape for whole in Intersection(self, nodes).shapes() for shape in self._lower(whole, place)]

    def _gathered(self, node: Node, above: Option, *, alone: bool = False) -> Iterator[Node]:
        """Yield ``node`` and the nodes that its $ref and allOf lead to, each without these keywords."""
        self._spend(1, node.place)
        if node in above:
            raise UnsupportedSchema(node.place, "only refers to itself; point the reference to a schema")
        self._check(node, alone=alone)
        keywords = self.document.keywords(node)
        left = node
        more: list[Node] = []
        for keyword, value in keywords.items():
            if keyword in ("$ref", "$dynamicRef"):
                if keyword == "$dynamicRef" and not self.document.is_plain(value):
                    raise UnsupportedSchema(f"{node.place}/$dynamicRef", "the anchor has several targets; use $ref")
                more += self._gathered(self.document.resolve(node, value), (*above, node))
            elif keyword == "allOf":
                for index, child in enumerate(value):
                    more += self._gathered(self.document.child(node, child, keyword, index), (*above, node))
            elif not (self.loose and keyword in _LOOSE):
                continue
            left = left.without(keyword)
        first = next(iter(keywords), None)
        yield from (*more, left) if first in ("$ref", "$dynamicRef", "allOf") else (left, *more)

    def _check(self, node: Node, *, alone: bool = False) -> None:
        """Raise UnsupportedSchema for unsupported keywords."""
        if not isinstance(node.schema, dict) or self.loose:
            return
        for keyword, value in self.document.keywords(node).items():
            if keyword in dialect.UNSUPPORTED and not _is_redundant(keyword, value, node.schema):
                raise UnsupportedSchema(f"{node.place}/{keyword}", dialect.UNSUPPORTED[keyword])
            if keyword in dialect.UNEVALUATED and value is not True and not node.is_remainder and not alone:
                other = "items" if keyword == "unevaluatedItems" else "additionalProperties"
                rule = f"it is only supported where no schema around it applies to the same value; use {other}"
                raise UnsupportedSchema(f"{node.place}/{keyword}", rule)

    def _literals(self, nodes: list[Node], values: list[Any], place: str) -> list[Shape]:
        fitting = [value for value in values if all(self._is_valid(node, value) for node in nodes)]
        return self._lower(Literals(fitting), place) if fitting else []

    def _lower(self, shape: Shape, place: str) -> list[Shape]:
        return plain(shape, self, place) if self._lowered else [shape]

    def _is_valid(self, node: Node, value: Any) -> bool:
        try:
            return self.document.is_valid(node, value)
        except UnsupportedSchema:
            if not self.loose:
                raise
            return True  # the finished text is validated

    def _choice(self, node: Node) -> tuple[str, ...]:
        """Return the keywords of the first choice in a node."""
        keywords = self.document.keywords(node)
        for keyword, value in keywords.items():
            if keyword in ("anyOf", "oneOf") or (keyword in dialect.DEPENDENT_KEYWORDS and value):
                return (keyword,)
            if keyword == "if" and ("then" in keywords or "else" in keywords):
                return ("if", "then", "else")
            if keyword == "not" and not self._excludes(node, value):
                return ("not",)
        return ()

    def _excludes(self, node: Node, value: Any) -> bool:
        inner = self.document.child(node, value, "not")
        self._check(inner)
        return excludes_only(self.document.keywords(inner))

    def _options(self, base: AllOf, node: Node, keyword: str) -> Iterator[Shape]:
        if keyword == "oneOf" and not self.loose:
            options = self._one_of(base, node)
        else:
            options = [AllOf(*base.nodes, *option) for option in self._ways(base, node, keyword)]
        for option in options:
            alone = self.canonical(option)
            if len(alone.nodes) == 1 and keyword in ("anyOf", "oneOf"):
                yield Ref(alone)
            else:
                yield from self.shapes(option)

    def _ways(self, base: AllOf, node: Node, keyword: str) -> list[Option]:
        value = self.document.keywords(node)[keyword]
        if keyword in ("anyOf", "oneOf"):
            return [(self.document.child(node, child, keyword, index),) for index, child in enumerate(value)]
        if keyword == "not":
            return [(way,) for way in self._negated(self.document.child(node, value, "not"), base.nodes)]
        if keyword == "if":
            return self._conditional(base, node)
        return self._dependent(node, keyword, value)

    def _dependent(self, node: Node, keyword: str, value: dict[str, Any]) -> list[Option]:
        """Return two options, without and with the first property; later expansions handle the other properties."""
        name, *others = value
        left: Option = ()
        if others:
            left = (
                node.derived(
                    {keyword: {other: value[other] for other in others}}, f"{keyword} {name}", condition=False
                ),
            )
        absent = node.derived({"properties": {name: False}}, f"{keyword} without {name}")
        needed = value[name] if keyword == "dependentRequired" else ()
        present: Option = (node.derived({"type": "object", "required": [name, *needed]}, f"{keyword} with {name}"),)
        if keyword == "dependentSchemas":
            assert isinstance(node.schema, dict)
            key = keyword if keyword in node.schema else "dependencies"
            present += (self.document.child(node, value[name], key, name),)
        return [(absent, *left), (*present, *left)]

    def _conditional(self, base: AllOf, node: Node) -> list[Option]:
        keywords = self.document.keywords(node)
        condition = self.document.child(node, keywords["if"], "if").as_condition()
        then, otherwise = (
            (self.document.child(node, keywords[key], key),) if key in keywords else () for key in ("then", "else")
        )
        nodes = (*base.nodes, *otherwise)
        return [(condition, *then), *((way, *otherwise) for way in self._negated(condition, nodes))]

    def _negated(self, node: Node, others: Option) -> list[Node]:
        """Return ``negated`` for values that are also valid for ``others``."""
        if self.document.has_several_bases:
            raise UnsupportedSchema(
                node.place, "negation is not supported in a schema with several bases ($id); leave them out"
            )
        self._check(node)
        names = self._described_names(others) if self.closed and self._is_about_names(node) else []
        ways = negated(self.document, node, names)
        self._spend(NAME_STEPS * len(names) * len(ways), node.place)
        return ways

    def _is_about_names(self, node: Node) -> bool:
        keywords = self.document.keywords(self._followed(node))
        return any(keyword in keywords for keyword in SCHEMAS_OF_NAMES)

    def _described_names(self, nodes: Option) -> list[str]:
        """Return the names of an object that fits ``nodes``, or an empty list if others are possible."""
        described = list(self._in_place(nodes, set()))
        closing = any(
            not node.condition
            and not keywords.get("additionalProperties", False)
            and (keywords.get("properties") or "additionalProperties" in keywords)
            for node, keywords in described
        )
        names = [
            name
            for _, keywords in described
            for name in (*keywords.get("properties", ()), *keywords.get("required", ()))
        ]
        return list(dict.fromkeys(names)) if closing else []

    def _in_place(self, nodes: Option, seen: set[Node]) -> Iterator[tuple[Node, dict[str, Any]]]:
        """Yield ``nodes`` and the schemas that may apply in place with them, with their keywords."""
        for node in nodes:
            if node in seen:
                continue
            seen.add(node)
            keywords = self.document.keywords(node)
            yield node, keywords
            children = [self.document.resolve(node, keywords["$ref"])] if "$ref" in keywords else []
            for keyword in ("allOf", "anyOf", "oneOf"):
                for index, child in enumerate(keywords.get(keyword, ())):
                    children.append(self.document.child(node, child, keyword, index))
            yield from self._in_place(tuple(children), seen)

    def _one_of(self, base: AllOf, node: Node) -> list[AllOf]:
        """Return one conjunction per branch, such that no value fits two of them."""
        branches = [
            self.document.child(node, child, "oneOf", index)
            for index, child in enumerate(self.document.keywords(node)["oneOf"])
        ]
        # A value that both match is invalid, whether or not it has names that the schemas together do not evaluate.
        shared = [node.without_unevaluated() for node in base.nodes]
        options = []
        for index, branch in enumerate(branches):
            option = AllOf(*base.nodes, branch)
            for other, rival in enumerate(branches):
                self._spend(len(option.nodes), node.place)
                if other == index or self._disjoint.are_disjoint(option, AllOf(*shared, rival)):
                    continue
                try:
                    self._negated(rival, option.nodes)
                except UnsupportedSchema as reason:
                    rule = f"branches {index} and {other} may both hold ({reason}); use anyOf, or a const each"
                    raise UnsupportedSchema(f"{node.place}/oneOf", rule) from None
                option += (node.derived({"not": rival.schema}, f"oneOf not {other}"),)
            options.append(option)
        return options

    def complement(self, expressions: list[str], place: str) -> str | None:
        """Return ``regex.complement`` of ``expressions``. Raises UnsupportedSchema."""
        try:
            self._spend(max(COMPLEMENT_STEPS, complement_size(tuple(expressions))), place)
            return complement(tuple(expressions))
        except UnsupportedPattern as error:
            raise UnsupportedSchema(
                place, f"{error} is not supported; say what is allowed instead of what is not"
            ) from None

    def _spend(self, steps: int, place: str) -> None:
        self._steps += steps
        if self._quick and self._steps > QUICK_STEPS:
            raise NotQuick
        if self._steps > MAX_STEPS:
            raise UnsupportedSchema(place, "too many combinations of schemas; simplify it")

    def names(self, all_of: AllOf, place: str) -> String | list[str]:
        """Return the property names that a ``propertyNames`` schema allows: a string shape, or a list.

        Raises UnsupportedSchema.
        """
        shapes = [shape for shape in self.resolved(all_of) if isinstance(shape, String | Literals)]
        listed = [value for shape in shapes if isinstance(shape, Literals) for value in shape.values]
        rules = [shape for shape in shapes if isinstance(shape, String)]
        if not rules:
            return [value for value in listed if isinstance(value, str)]
        if len(rules) > 1 or listed:
            raise UnsupportedSchema(
                f"{place}/propertyNames", "a choice between rules is not supported; write one pattern"
            )
        return rules[0]

    def resolved(self, all_of: AllOf) -> list[Shape]:
        """Return the shapes of a conjunction with all references to others resolved. Raises UnsupportedSchema."""
        return self._resolved(self.canonical(all_of), set())

    def _resolved(self, all_of: AllOf, seen: set[AllOf]) -> list[Shape]:
        """Return the shapes that no conjunction in ``seen`` has; each conjunction is visited once."""
        if all_of in seen:
            return []
        seen.add(all_of)
        resolved: list[Shape] = []
        for shape in self.shapes(all_of):
            resolved += self._resolved(self.canonical(shape.target), seen) if isinstance(shape, Ref) else [shape]
        return resolved


def _is_redundant(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
    """Return whether an unsupported keyword has a value that constrains nothing more."""
    if keyword == "contains":
        return "maxContains" not in schema and (value in (True, {}) or schema.get("minContains") == 0)
    return value in (True, {})

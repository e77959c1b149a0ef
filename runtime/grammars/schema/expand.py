"""From schemas that hold together to the shapes of which one may hold: references followed, choices made one by one."""

from collections.abc import Iterator
from typing import Any

from tandemrt.engines.errors import NotQuick
from tandemrt.runtime.grammars.opposites import effort, opposite
from tandemrt.runtime.grammars.pattern_parts import Unreadable
from tandemrt.runtime.grammars.schema import dialect
from tandemrt.runtime.grammars.schema.disjoint import Disjoint
from tandemrt.runtime.grammars.schema.document import Document, Node, Unheld
from tandemrt.runtime.grammars.schema.facts import Facts, excludes_only
from tandemrt.runtime.grammars.schema.negate import negated
from tandemrt.runtime.grammars.schema.plain import plain
from tandemrt.runtime.grammars.schema.shapes import Conj, Literals, Same, Shape, String

MOST_SHAPES = 512  # of one place
MOST_STEPS = 20_000  # of one schema
OPPOSITE_STEPS = 50  # that an opposite of patterns counts for, or more where it is more work
QUICK_STEPS = 1000  # that are no trouble wherever they are taken: some ten milliseconds

# Keywords that are left out where a text is checked in the end.
_LOOSE = frozenset({"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "contains", "uniqueItems"})
_LOOSE |= {"propertyNames", "minProperties", "maxProperties", "unevaluatedProperties", "unevaluatedItems"}

Option = tuple[Node, ...]


class Expander:
    """The shapes of the schemas of one document, each worked out once; if ``quick``, or NotQuick is raised."""

    def __init__(self, document: Document, *, closed: bool = True, loose: bool = False, quick: bool = False) -> None:
        self.document = document
        self._quick = quick
        self.closed = closed  # objects that are described have no other names unless their schema says so
        self.loose = loose  # what is not held is left open, for the finished text is checked
        self._known: dict[Conj, list[Shape]] = {}
        self._alike: dict[Conj, Conj] = {}
        self._active: set[Conj] = set()
        self._steps = 0
        self._disjoint = Disjoint(self)

    def conj(self, conj: Conj) -> Conj:
        """The same schemas with references that stand alone followed, so that what is the same has one name."""
        if conj not in self._alike:
            self._alike[conj] = Conj(*(self._followed(node) for node in conj.nodes))
        return self._alike[conj]

    def shapes(self, conj: Conj) -> list[Shape]:
        """Raises Unheld."""
        if conj not in self._known:
            if conj in self._active:
                raise Unheld(conj.nodes[0].place, "only refers to itself; point the reference to a schema")
            self._active.add(conj)
            try:
                found = self._shapes(conj)
            finally:
                self._active.discard(conj)
            if len(found) > MOST_SHAPES:
                raise Unheld(conj.nodes[0].place, f"more than {MOST_SHAPES} combinations of choices; simplify it")
            self._known[conj] = found
        return self._known[conj]

    def _followed(self, node: Node) -> Node:
        passed = set()
        while self.document.keywords(node).keys() == {"$ref"}:
            self._check(node)
            if node in passed:
                raise Unheld(f"{node.place}/$ref", "only refers to itself; point it to a schema")
            passed.add(node)
            assert isinstance(node.schema, dict)
            node = self.document.resolve(node, node.schema["$ref"])
        return node

    def _shapes(self, conj: Conj) -> list[Shape]:
        nodes: list[Node] = []
        for node in conj.nodes:
            nodes += self._gathered(node, (), alone=len(conj.nodes) == 1)
        if any(node.schema is False for node in nodes):
            return []
        for node in nodes:
            found = self.document.keywords(node)
            if "const" in found or "enum" in found:
                keyword = "const" if "const" in found else "enum"
                values = [found["const"]] if "const" in found else found["enum"]
                # A value that is listed need not be looked for in its own list, which may be long.
                asked = [each.without(keyword) if each.whole_name == node.whole_name else each for each in conj.nodes]
                return self._literals(asked, values, f"{node.place}/{keyword}")
        for index, node in enumerate(nodes):
            choice = self._choice(node)
            if choice:
                base = Conj(*nodes[:index], node.without(*choice), *nodes[index + 1 :])
                return list(self._options(base, node, choice[0]))
        place = conj.nodes[0].place if conj.nodes else "#"
        shapes = Facts(self, nodes).shapes()
        return [shape for found in shapes for shape in plain(found, self, place)]

    def _gathered(self, node: Node, above: Option, *, alone: bool = False) -> Iterator[Node]:
        """The node and all that hold with it, without the keywords that led there."""
        self._spend(1, node.place)
        if node in above:
            raise Unheld(node.place, "only refers to itself; point the reference to a schema")
        self._check(node, alone=alone)
        found = self.document.keywords(node)
        left = node
        more: list[Node] = []
        for keyword, value in found.items():
            if keyword in ("$ref", "$dynamicRef"):
                if keyword == "$dynamicRef" and not self.document.is_plain(value):
                    raise Unheld(f"{node.place}/$dynamicRef", "several places bear that anchor; use $ref")
                more += self._gathered(self.document.resolve(node, value), (*above, node))
            elif keyword == "allOf":
                for index, child in enumerate(value):
                    more += self._gathered(self.document.child(node, child, keyword, index), (*above, node))
            elif not (self.loose and keyword in _LOOSE):
                continue
            left = left.without(keyword)
        first = next(iter(found), None)
        yield from (*more, left) if first in ("$ref", "$dynamicRef", "allOf") else (left, *more)

    def _check(self, node: Node, *, alone: bool = False) -> None:
        """Refuse keywords that nobody holds, and those that look like a slip of the pen."""
        if not isinstance(node.schema, dict) or self.loose:
            return
        for keyword in node.schema:
            if meant := dialect.misspelled(keyword):
                raise Unheld(f"{node.place}/{keyword}", f"is no keyword; did you mean {meant!r}?")
        for keyword, value in self.document.keywords(node).items():
            if keyword in dialect.UNHELD and not _says_little(keyword, value, node.schema):
                raise Unheld(f"{node.place}/{keyword}", dialect.UNHELD[keyword])
            if keyword == "unevaluatedProperties" and value is not True and not node.is_rest:
                beside = not alone or not {"not", "if", "dependentSchemas"}.isdisjoint(node.schema)
                if value is not False or beside:
                    rule = (
                        "only false is held, and only where no other schema holds beside it; use additionalProperties"
                    )
                    raise Unheld(f"{node.place}/{keyword}", rule)

    def _literals(self, asked: list[Node], values: list[Any], place: str) -> list[Shape]:
        fitting = [value for value in values if all(self._holds(node, value) for node in asked)]
        return plain(Literals(fitting), self, place) if fitting else []

    def _holds(self, node: Node, value: Any) -> bool:
        try:
            return self.document.holds(node, value)
        except Unheld:
            if not self.loose:
                raise
            return True  # the finished text is checked

    def _choice(self, node: Node) -> tuple[str, ...]:
        """The keywords of the first choice that a node leaves."""
        found = self.document.keywords(node)
        for keyword, value in found.items():
            if keyword in ("anyOf", "oneOf") or (keyword in dialect.DEPENDENT and value):
                return (keyword,)
            if keyword == "if" and ("then" in found or "else" in found):
                return ("if", "then", "else")
            if keyword == "not" and not self._excludes(node, value):
                return ("not",)
        return ()

    def _excludes(self, node: Node, value: Any) -> bool:
        inner = self.document.child(node, value, "not")
        self._check(inner)
        return excludes_only(self.document.keywords(inner))

    def _options(self, base: Conj, node: Node, keyword: str) -> Iterator[Shape]:
        if keyword == "oneOf" and not self.loose:
            options = self._one_of(base, node)
        else:
            options = [Conj(*base.nodes, *option) for option in self._ways(node, keyword)]
        for option in options:
            alone = self.conj(option)
            if len(alone.nodes) == 1 and keyword in ("anyOf", "oneOf"):
                yield Same(alone)
            else:
                yield from self.shapes(option)

    def _ways(self, node: Node, keyword: str) -> list[Option]:
        value = self.document.keywords(node)[keyword]
        if keyword in ("anyOf", "oneOf"):
            return [(self.document.child(node, child, keyword, index),) for index, child in enumerate(value)]
        if keyword == "not":
            return [(way,) for way in self._negated(self.document.child(node, value, "not"))]
        if keyword == "if":
            return self._conditional(node)
        return self._dependent(node, keyword, value)

    def _dependent(self, node: Node, keyword: str, value: dict[str, Any]) -> list[Option]:
        """Without the first name, or with it and what it needs; the other names are left for later."""
        name, *others = value
        left: Option = ()
        if others:
            left = (
                node.made({keyword: {other: value[other] for other in others}}, f"{keyword} {name}", condition=False),
            )
        absent = node.made({"properties": {name: False}}, f"{keyword} without {name}")
        needed = value[name] if keyword == "dependentRequired" else ()
        present: Option = (node.made({"type": "object", "required": [name, *needed]}, f"{keyword} with {name}"),)
        if keyword == "dependentSchemas":
            assert isinstance(node.schema, dict)
            key = keyword if keyword in node.schema else "dependencies"
            present += (self.document.child(node, value[name], key, name),)
        return [(absent, *left), (*present, *left)]

    def _conditional(self, node: Node) -> list[Option]:
        found = self.document.keywords(node)
        asked = self.document.child(node, found["if"], "if").asking()
        then, otherwise = (
            (self.document.child(node, found[key], key),) if key in found else () for key in ("then", "else")
        )
        return [(asked, *then), *((way, *otherwise) for way in self._negated(asked))]

    def _negated(self, node: Node) -> list[Node]:
        if self.document.several:
            raise Unheld(node.place, "an opposite is not held in a schema with several bases ($id); leave them out")
        self._check(node)
        return negated(self.document, node)

    def _one_of(self, base: Conj, node: Node) -> list[Conj]:
        """One conjunction per branch, which no other branch shares a value with."""
        branches = [
            self.document.child(node, child, "oneOf", index)
            for index, child in enumerate(self.document.keywords(node)["oneOf"])
        ]
        options = []
        for index, branch in enumerate(branches):
            option = Conj(*base.nodes, branch)
            for other, rival in enumerate(branches):
                self._spend(len(option.nodes), node.place)
                if other == index or self._disjoint.conjs(option, Conj(*base.nodes, rival)):
                    continue
                try:
                    self._negated(rival)
                except Unheld as reason:
                    rule = f"branches {index} and {other} may both hold ({reason}); use anyOf, or a const each"
                    raise Unheld(f"{node.place}/oneOf", rule) from None
                option += (node.made({"not": rival.schema}, f"oneOf not {other}"),)
            options.append(option)
        return options

    def opposite(self, found: list[str], place: str) -> str | None:
        """What a text matches in which no pattern of ``found`` is found; None if there is none. Raises Unheld."""
        try:
            self._spend(max(OPPOSITE_STEPS, effort(tuple(found))), place)
            return opposite(tuple(found))
        except Unreadable as error:
            raise Unheld(place, f"{error} is not held; say what is allowed instead of what is not") from None

    def _spend(self, steps: int, place: str) -> None:
        self._steps += steps
        if self._quick and self._steps > QUICK_STEPS:
            raise NotQuick
        if self._steps > MOST_STEPS:
            raise Unheld(place, "too many combinations of schemas; simplify it")

    def names(self, conj: Conj, place: str) -> String | list[str]:
        """What schemas of names come to: one rule, or a list. Raises Unheld."""
        found = [shape for shape in self.resolved(conj) if isinstance(shape, String | Literals)]
        listed = [value for shape in found if isinstance(shape, Literals) for value in shape.values]
        rules = [shape for shape in found if isinstance(shape, String)]
        if not rules:
            return [value for value in listed if isinstance(value, str)]
        if len(rules) > 1 or listed:
            raise Unheld(f"{place}/propertyNames", "a choice between rules is not held; write one pattern")
        return rules[0]

    def resolved(self, conj: Conj) -> list[Shape]:
        """The shapes of a conjunction, those it shares with others included. Raises Unheld."""
        resolved: list[Shape] = []
        for shape in self.shapes(self.conj(conj)):
            resolved += self.resolved(shape.conj) if isinstance(shape, Same) else [shape]
        return resolved


def _says_little(keyword: str, value: Any, schema: dict[str, Any]) -> bool:
    """Whether a keyword that is not held asks for nothing that others do not hold."""
    if keyword == "contains":
        return "maxContains" not in schema and (value in (True, {}) or schema.get("minContains") == 0)
    return value in (True, {})

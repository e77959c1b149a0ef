"""What schemas that hold together say about an object: each name gets what all of them ask of it."""

from typing import TYPE_CHECKING, Any

from tandemrt.engines.errors import quoted
from tandemrt.runtime.grammars import patterns
from tandemrt.runtime.grammars.pattern_parts import Unreadable
from tandemrt.runtime.grammars.schema.document import Node, Unheld
from tandemrt.runtime.grammars.schema.shapes import ANYTHING, NOTHING, Conj, Object, String

if TYPE_CHECKING:
    from tandemrt.runtime.grammars.schema.expand import Expander

_MEANT = frozenset({"properties", "required", "additionalProperties", "patternProperties", "propertyNames"})
_COUNTED = frozenset({"minProperties", "maxProperties", "unevaluatedProperties"})


class Objects:
    """Nodes whose keywords all hold at once, as far as they speak of objects.

    If the expander is ``closed``, objects that are described by properties or patterns have no other names unless
    ``additionalProperties`` says so.
    """

    def __init__(self, expander: "Expander", nodes: list[tuple[Node, dict[str, Any]]]) -> None:
        self._expander = expander
        self._document = expander.document
        self._nodes = [(node, found) for node, found in nodes if not found.keys().isdisjoint(_MEANT | _COUNTED)]

    def shape(self) -> Object:
        """Raises Unheld."""
        nodes = self._nodes
        shape = Object({}, [], {}, self._rest())
        for _, found in nodes:
            shape.required += [name for name in found.get("required", ()) if name not in shape.required]
            shape.least = max(shape.least, int(found.get("minProperties", 0)))
            if "maxProperties" in found:
                most = int(found["maxProperties"])
                shape.most = most if shape.most is None else min(shape.most, most)
        names = [name for _, found in nodes for name in found.get("properties", {})]
        for name in dict.fromkeys(names + shape.required):
            shape.properties[name] = self._property(name)
        for node, found in nodes:
            for pattern, child in found.get("patternProperties", {}).items():
                written = _read(pattern, node)
                asked = Conj(*shape.patterns.get(written, ANYTHING).nodes, *self._pattern(node, pattern, child))
                shape.patterns[written] = asked
        if shape.rest is not None and shape.patterns:
            self._name_others(shape, shape.rest)
        return shape

    def _name_others(self, shape: Object, rest: Conj) -> None:
        """Write a pattern for the names that none is found in: the engine would let in others under escaped names."""
        found = [pattern for _, asked in self._nodes for pattern in asked.get("patternProperties", {})]
        place = f"{self._nodes[0][0].place}/patternProperties"
        others = self._expander.opposite(list(dict.fromkeys(found)), place)
        if others is not None:
            shape.patterns[others] = rest
        shape.rest = None

    def asks_of_names(self) -> Conj:
        """What ``propertyNames`` asks of each name."""
        return Conj(
            *(
                self._document.child(node, found["propertyNames"], "propertyNames")
                for node, found in self._nodes
                if found.get("propertyNames", True) is not True
            )
        )

    def _rest(self) -> Conj | None:
        asked = [
            self._document.child(node, found["additionalProperties"], "additionalProperties")
            for node, found in self._nodes
            if "additionalProperties" in found
        ]
        if asked:
            conj = Conj(*asked)
            return None if conj.is_nothing() else conj
        described = (
            found.get("unevaluatedProperties") is False
            or (
                self._expander.closed
                and not node.condition
                and (found.get("properties") or found.get("patternProperties"))
            )
            for node, found in self._nodes
        )
        return None if any(described) else ANYTHING

    def _property(self, name: str) -> Conj:
        asked: list[Node] = []
        for node, found in self._nodes:
            own = []
            if name in found.get("properties", {}):
                own.append(self._document.child(node, found["properties"][name], "properties", name))
            for pattern, child in found.get("patternProperties", {}).items():
                if _matches(_read(pattern, node), name, node):
                    own.append(self._document.child(node, child, "patternProperties", pattern))
            if not own and "additionalProperties" in found:
                own.append(self._document.child(node, found["additionalProperties"], "additionalProperties"))
            asked += own
        return Conj(*asked)

    def _pattern(self, node: Node, pattern: str, child: Any) -> list[Node]:
        """What is asked of the names with ``pattern`` that no node lists: all nodes have a say."""
        asked = [self._document.child(node, child, "patternProperties", pattern)]
        for other, found in self._nodes:
            more = found.get("additionalProperties", True)
            if other == node or more is True or pattern in found.get("patternProperties", {}):
                continue
            if found.get("patternProperties"):
                raise Unheld(
                    f"{other.place}/patternProperties",
                    f"beside {quoted(pattern)} of another schema that holds here too it is not held; merge them",
                )
            asked.append(self._document.child(other, more, "additionalProperties"))
        return asked


def with_names(shape: Object, names: String | list[str], place: str) -> Object:
    """``shape`` with other names than its properties only where ``names`` allows them. Raises Unheld."""
    if shape.rest is None and not shape.patterns:
        return shape
    if isinstance(names, list):
        for name in names:
            if name not in shape.properties:
                asked = [conj for key, conj in shape.patterns.items() if patterns.matches(key, name)]
                if asked or shape.rest is not None:
                    shape.properties[name] = Conj(
                        *(node for conj in asked or [shape.rest or NOTHING] for node in conj.nodes)
                    )
        shape.patterns, shape.rest = {}, None
        return shape
    limits = f"(?s:.){{{names.least},{'' if names.most is None else names.most}}}"
    if shape.patterns or len(names.patterns) > 1 or (names.patterns and limits != "(?s:.){0,}"):
        raise Unheld(f"{place}/propertyNames", "more than one rule for the same names is not held; write one pattern")
    shape.patterns = {(names.patterns or [limits])[0]: shape.rest or NOTHING}
    shape.rest = None
    return shape


def _read(pattern: str, node: Node) -> str:
    try:
        return patterns.whole(pattern)
    except Unreadable as error:
        raise Unheld(f"{node.place}/patternProperties", f"{quoted(pattern)}: {error} is not held") from None


def _matches(written: str, name: str, node: Node) -> bool:
    try:
        return patterns.matches(written, name)
    except Unreadable as error:
        raise Unheld(f"{node.place}/patternProperties", f"{error} is not held") from None

"""A conservative test that two schemas share no value: by type, literals, bounds, or nested schemas."""

from tandemrt.runtime.grammars.regex import patterns
from tandemrt.runtime.grammars.schema.document import UnsupportedSchema
from tandemrt.runtime.grammars.schema.expansion import Expansion
from tandemrt.runtime.grammars.schema.shapes import (
    ANYTHING,
    AllOf,
    Array,
    Literals,
    Number,
    Object,
    Plain,
    Shape,
    String,
)

_MAX_DEPTH = 4  # nested levels that are compared


class Disjoint:
    """Tests whether schemas are disjoint.

    Args:
        expander: gives the shapes that the grammar writes.
        upper: gives shapes that all valid values fit. A closed object does not: more names are valid than are written.
    """

    def __init__(self, expander: Expansion, upper: Expansion) -> None:
        self._expander = expander
        self._upper = upper

    def are_disjoint(self, one: AllOf, other: AllOf, depth: int = _MAX_DEPTH) -> bool:
        """Return whether no value that the grammar of ``one`` writes is valid for ``other``; False if uncertain."""
        if not depth:
            return False
        if one.is_nothing() or other.is_nothing():
            return True
        try:
            ours, theirs = self._expander.resolved(one), self._upper.resolved(other)
        except UnsupportedSchema:
            return False
        return all(self._shapes(a, one, b, other, depth) for a in ours for b in theirs)

    def _shapes(self, a: Shape, one: AllOf, b: Shape, other: AllOf, depth: int) -> bool:
        if isinstance(a, Literals):
            return not any(self._is_valid(other, value) for value in a.values)
        if isinstance(b, Literals):
            return not any(self._is_valid(one, value) for value in b.values)
        if isinstance(a, Plain) or isinstance(b, Plain) or type(a) is not type(b):
            return not (isinstance(a, Plain) and isinstance(b, Plain) and a.kind == b.kind)
        if isinstance(a, Number) and isinstance(b, Number):
            return a.both(b).is_empty()
        if isinstance(a, String) and isinstance(b, String):
            return _ranges_are_disjoint(a.least, a.most, b.least, b.most)
        if isinstance(a, Array) and isinstance(b, Array):
            return _ranges_are_disjoint(a.least, a.most, b.least, b.most) or self._arrays(a, b, depth)
        return isinstance(a, Object) and isinstance(b, Object) and self._objects(a, b, depth)

    def _arrays(self, a: Array, b: Array, depth: int) -> bool:
        for index in range(min(max(a.least, b.least), max(len(a.first), len(b.first)) + 1)):
            ours = a.first[index] if index < len(a.first) else a.rest
            theirs = b.first[index] if index < len(b.first) else b.rest
            if ours is None or theirs is None or self.are_disjoint(ours, theirs, depth - 1):
                return True
        return False

    def _objects(self, a: Object, b: Object, depth: int) -> bool:
        # The grammar of `a` writes only names that `a` allows; `b` may be open to more names.
        for name in dict.fromkeys([*a.required, *b.required]):
            ours = a.properties.get(name)
            if ours is None:
                if a.rest is None and not any(patterns.matches(key, name) for key in a.patterns):
                    return True
                continue
            if self.are_disjoint(ours, b.properties.get(name, ANYTHING), depth - 1):
                return True
        return False

    def _is_valid(self, all_of: AllOf, value: object) -> bool:
        return all(self._expander.document.is_valid(node.without_unevaluated(), value) for node in all_of.nodes)


def _ranges_are_disjoint(least: int, most: int | None, other_least: int, other_most: int | None) -> bool:
    return (most is not None and other_least > most) or (other_most is not None and least > other_most)

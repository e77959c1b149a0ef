"""Which schemas share no value, as far as it can be seen: by type, by a literal, by bounds, or within."""

from typing import TYPE_CHECKING

from tandemrt.runtime.grammars import patterns
from tandemrt.runtime.grammars.schema.document import Unheld
from tandemrt.runtime.grammars.schema.shapes import (
    ANYTHING,
    Array,
    Conj,
    Literals,
    Number,
    Object,
    Plain,
    Shape,
    String,
)

if TYPE_CHECKING:
    from tandemrt.runtime.grammars.schema.expand import Expander

_DEEPEST = 4  # levels that are looked into


class Disjoint:
    def __init__(self, expander: "Expander") -> None:
        self._expander = expander

    def conjs(self, one: Conj, other: Conj, depth: int = _DEEPEST) -> bool:
        """Whether nothing that is written for ``one`` fits ``other``. False where that is not seen."""
        if not depth:
            return False
        if one.is_nothing() or other.is_nothing():
            return True
        try:
            ours, theirs = self._expander.resolved(one), self._expander.resolved(other)
        except Unheld:
            return False
        return all(self._shapes(a, one, b, other, depth) for a in ours for b in theirs)

    def _shapes(self, a: Shape, one: Conj, b: Shape, other: Conj, depth: int) -> bool:
        if isinstance(a, Literals):
            return not any(self._holds(other, value) for value in a.values)
        if isinstance(b, Literals):
            return not any(self._holds(one, value) for value in b.values)
        if isinstance(a, Plain) or isinstance(b, Plain) or type(a) is not type(b):
            return not (isinstance(a, Plain) and isinstance(b, Plain) and a.kind == b.kind)
        if isinstance(a, Number) and isinstance(b, Number):
            return a.both(b).is_empty()
        if isinstance(a, String) and isinstance(b, String):
            return _apart(a.least, a.most, b.least, b.most)
        if isinstance(a, Array) and isinstance(b, Array):
            return _apart(a.least, a.most, b.least, b.most) or self._arrays(a, b, depth)
        return isinstance(a, Object) and isinstance(b, Object) and self._objects(a, b, depth)

    def _arrays(self, a: Array, b: Array, depth: int) -> bool:
        for index in range(min(max(a.least, b.least), max(len(a.first), len(b.first)) + 1)):
            ours = a.first[index] if index < len(a.first) else a.rest
            theirs = b.first[index] if index < len(b.first) else b.rest
            if ours is None or theirs is None or self.conjs(ours, theirs, depth - 1):
                return True
        return False

    def _objects(self, a: Object, b: Object, depth: int) -> bool:
        # What is written for `a` has no names beyond its own; `b` is any value that fits, so it may have more.
        for name in dict.fromkeys([*a.required, *b.required]):
            ours = a.properties.get(name)
            if ours is None:
                if a.rest is None and not any(patterns.matches(key, name) for key in a.patterns):
                    return True
                continue
            if self.conjs(ours, b.properties.get(name, ANYTHING), depth - 1):
                return True
        return False

    def _holds(self, conj: Conj, value: object) -> bool:
        return all(self._expander.document.holds(node, value) for node in conj.nodes)


def _apart(least: int, most: int | None, other_least: int, other_most: int | None) -> bool:
    return (most is not None and other_least > most) or (other_most is not None and least > other_most)

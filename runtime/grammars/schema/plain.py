"""Shapes as the engine holds them: sets of what is finite are listed, counts of names become choices of names."""

from dataclasses import replace
from itertools import combinations, permutations
from math import comb, perm
from typing import TYPE_CHECKING, Any

from tandemrt.engines.errors import clipped
from tandemrt.runtime.grammars.schema.document import Unheld
from tandemrt.runtime.grammars.schema.facts import exact
from tandemrt.runtime.grammars.schema.shapes import NOTHING, Array, Literals, Object, Plain, Shape

if TYPE_CHECKING:
    from tandemrt.runtime.grammars.schema.expand import Expander

MOST_SEQUENCES = 400  # of different items
MOST_CHOICES = 128  # of names
MOST_OPTIONAL = 400  # of one object: llguidance gives up on more within a text


def plain(shape: Shape, expander: "Expander", place: str) -> list[Shape]:
    """``shape`` in forms that the engine holds. Raises Unheld."""
    if isinstance(shape, Literals):
        for value in shape.values:
            if not exact(value):
                raise Unheld(place, f"{clipped(value)} holds a number that is not read exactly; write it as a string")
        return [shape]
    if isinstance(shape, Array):
        return _array(shape, expander, place)
    if isinstance(shape, Object):
        return _object(shape, place)
    return [shape]


def _array(shape: Array, expander: "Expander", place: str) -> list[Shape]:
    if shape.rest is not None and shape.rest.is_nothing():
        shape = replace(shape, rest=None)
    if shape.most is not None and shape.least > shape.most:
        return []
    if not shape.unique or shape.most in (0, 1):
        return [shape]
    values = [] if shape.first or shape.rest is None else _finite(expander.resolved(shape.rest))
    if not values:
        raise Unheld(
            f"{place}/uniqueItems", "only a few listed values are held apart; list them in an enum, or leave it out"
        )
    most = len(values) if shape.most is None else min(shape.most, len(values))
    if sum(perm(len(values), length) for length in range(shape.least, most + 1)) > MOST_SEQUENCES:
        raise Unheld(f"{place}/uniqueItems", f"more than {MOST_SEQUENCES} orders of the values; limit maxItems")
    sequences = [list(items) for length in range(shape.least, most + 1) for items in permutations(values, length)]
    return [Literals(sequences)] if sequences else []


def _finite(shapes: list[Shape]) -> list[Any]:
    """The values of shapes that list them, each once; none if a shape does not."""
    values: list[Any] = []
    for shape in shapes:
        if isinstance(shape, Literals):
            values += shape.values
        elif isinstance(shape, Plain):
            values += [None] if shape.kind == "null" else [True, False]
        else:
            return []
    kept: list[Any] = []
    for value in values:
        if not any(_same(value, other) for other in kept):
            kept.append(value)
    return kept


def _same(one: Any, other: Any) -> bool:
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _object(shape: Object, place: str) -> list[Shape]:
    nothing = {name for name, asked in shape.properties.items() if asked.is_nothing()}
    if nothing.intersection(shape.required):
        return []
    if shape.patterns and any(set(name) & _ESCAPED for name in shape.properties):
        raise Unheld(
            f"{place}/patternProperties",
            "a property with a quote, backslash or control character is not held beside it",
        )
    optional = [name for name in shape.properties if name not in shape.required and name not in nothing]
    if len(optional) > MOST_OPTIONAL or (len(shape.properties) > MOST_OPTIONAL and shape.rest is not None):
        rule = f"more than {MOST_OPTIONAL} optional properties, or beside other names, are not held; split the object"
        raise Unheld(f"{place}/properties", rule)
    closed = shape.rest is None and not shape.patterns
    least = max(0, shape.least - len(shape.required))
    most = None if shape.most is None else shape.most - len(shape.required)
    if most is not None and (most < 0 or most < least):
        return []
    if closed:
        if least > len(optional):
            return []
        return [*_counted(shape, optional, least, len(optional) if most is None else most, place)]
    if least > 1 or (optional and (least or most is not None)):
        raise Unheld(f"{place}/minProperties", "names that repeat would count twice; leave it out beside other names")
    return [shape]


def _counted(shape: Object, optional: list[str], least: int, most: int, place: str) -> list[Object]:
    """Closed objects with ``least`` to ``most`` of the optional names: choices of names that are needed or missing."""
    shape = replace(shape, least=0, most=None)
    if most >= len(optional):
        most = len(optional)
    if comb(len(optional), least) * comb(len(optional), most) > MOST_CHOICES:
        raise Unheld(
            f"{place}/minProperties", f"more than {MOST_CHOICES} choices of names; make names required instead"
        )
    shapes: list[Object] = []
    for kept in combinations(optional, most):
        absent = {name: NOTHING for name in optional if name not in kept}
        there = replace(shape, properties=shape.properties | absent)
        shapes += [replace(there, required=[*shape.required, *needed]) for needed in combinations(kept, least)]
    return shapes


_ESCAPED = {*map(chr, range(32)), '"', "\\", "\x7f"}

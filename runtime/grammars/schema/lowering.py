"""Lower shapes to forms that llguidance enforces: enumerate finite sets and property counts."""

import math
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import comb

from tandemrt.engines.validation.errors import clipped
from tandemrt.runtime.grammars.regex.finite import few_texts
from tandemrt.runtime.grammars.schema.document import UnsupportedSchema
from tandemrt.runtime.grammars.schema.expansion import Expansion
from tandemrt.runtime.grammars.schema.intersection import exact
from tandemrt.runtime.grammars.schema.shapes import (
    NOTHING,
    Array,
    Literals,
    Number,
    Object,
    Shape,
    common_multiple,
)
from tandemrt.runtime.grammars.schema.unique_sequences import UniqueSequences

MAX_CHOICES = 128  # of property names
MAX_DECIMALS = 9
SMALLEST_GAP = Fraction(1, 10**15)  # between an exclusive bound and the numbers next to it, where it matters
# llguidance holds bounds in doubles or 64 bits. It writes a pattern of the digits of every number beyond a lone bound.
MAX_BOUND, MAX_ROUNDED_BOUND, MAX_LONE_BOUND = 2**63 - 1, 2**63 - 2048, 10**18 - 1024
MIN_DISTANCE = 4096  # of two bounds that are rounded to doubles
MAX_OPTIONAL = 400  # properties of one object; llguidance exceeds its limits with more


def plain(shape: Shape, expander: Expansion, place: str) -> list[Shape]:
    """Return ``shape`` as alternatives that the engine enforces. Raises UnsupportedSchema."""
    if isinstance(shape, Literals):
        for value in shape.values:
            if not exact(value):
                raise UnsupportedSchema(
                    place, f"{clipped(value)} contains a number that is not exact as a double; write it as a string"
                )
        return [shape]
    if isinstance(shape, Number):
        numbers = _number(shape)
        for each in numbers:
            _check_bounds(each, place)
        return [*numbers]
    if isinstance(shape, Array):
        return _array(shape, expander, place)
    if isinstance(shape, Object):
        return _object(shape, place)
    return [shape]


def _check_bounds(shape: Number, place: str) -> None:
    """Raise UnsupportedSchema for a bound that llguidance rejects, or replaces by the nearest integer of 64 bits."""
    lows = {"minimum": shape.low, "exclusiveMinimum": shape.above}
    highs = {"maximum": shape.high, "exclusiveMaximum": shape.below}
    inner = MAX_ROUNDED_BOUND if any(bound is not None for bound in highs.values()) else MAX_LONE_BOUND
    for keyword, bound in lows.items():
        _check_bound(f"{place}/{keyword}", bound, -MAX_BOUND, inner)
    inner = MAX_ROUNDED_BOUND if any(bound is not None for bound in lows.values()) else MAX_LONE_BOUND
    for keyword, bound in highs.items():
        _check_bound(f"{place}/{keyword}", bound, -inner, MAX_BOUND)
    ends = [max((bound for bound in lows.values() if bound is not None), default=None)]
    ends += [min((bound for bound in highs.values() if bound is not None), default=None)]
    low, high = ends
    if low is not None and high is not None and max(abs(low), abs(high)) > 2**53 and high - low < MIN_DISTANCE:
        keyword = "minimum" if low == shape.low else "exclusiveMinimum"
        reason = (
            f"must be at least {MIN_DISTANCE} below the maximum {clipped(high)}, as numbers beyond 2**53 are rounded"
        )
        raise UnsupportedSchema(f"{place}/{keyword}", f"{reason}, received {clipped(low)}; use an enum of strings")


def _check_bound(place: str, bound: Fraction | None, least: int, most: int) -> None:
    if bound is not None and not least <= bound <= most:
        rule = f"must be from {least} to {most} here"
        raise UnsupportedSchema(place, f"{rule}, received {clipped(bound)}; use another bound, or leave it out")


def _number(shape: Number) -> list[Number]:
    """Move bounds and add numbers of decimals, where llguidance 1.9.1 would accept too much or too little."""
    shape = _within_64_bits(shape)
    if shape.integer:
        return [_with_inclusive_bounds(shape)]
    step = common_multiple(shape.multiples)
    shape = _with_inner_bounds(shape, step)
    shapes = [shape] if step is None else [shape, *_with_fewer_decimals(shape, step)]
    return [each for each in shapes if not each.is_empty()]


def _with_inclusive_bounds(shape: Number) -> Number:
    """Return an integer shape with inclusive integer bounds. llguidance would add 1 to 2^53 as a double."""
    low = [math.ceil(shape.low)] if shape.low is not None else []
    low += [math.floor(shape.above) + 1] if shape.above is not None else []
    high = [math.floor(shape.high)] if shape.high is not None else []
    high += [math.ceil(shape.below) - 1] if shape.below is not None else []
    return Number(
        integer=True,
        low=Fraction(max(low)) if low else None,
        high=Fraction(min(high)) if high else None,
        multiples=shape.multiples,
    )


def _within_64_bits(shape: Number) -> Number:
    """Move bounds that are further outside than llguidance allows, such as those of a float32 or an int64."""
    return replace(
        shape,
        low=_at_least(shape.low),
        above=_at_least(shape.above),
        high=_at_most(shape.high),
        below=_at_most(shape.below),
    )


def _at_least(bound: Fraction | None) -> Fraction | None:
    return Fraction(-MAX_ROUNDED_BOUND) if bound is not None and bound < -MAX_BOUND else bound


def _at_most(bound: Fraction | None) -> Fraction | None:
    return Fraction(MAX_ROUNDED_BOUND) if bound is not None and bound > MAX_BOUND else bound


def _with_inner_bounds(shape: Number, step: Fraction | None) -> Number:
    """Replace an exclusive bound that llguidance would accept by an inclusive one further inside.

    Such a bound is an integer less than 1 away from the other bound, on the side of zero: the 0 of 0 < x <= 0.5.
    """
    lows = [bound for bound in (shape.low, shape.above) if bound is not None]
    highs = [bound for bound in (shape.high, shape.below) if bound is not None]
    if not lows or not highs or min(highs) - max(lows) >= 1:
        return shape
    gap = step or SMALLEST_GAP
    if shape.above is not None and shape.above == max(lows) and shape.above >= 0 and shape.above.denominator == 1:
        return replace(shape, low=(shape.above // gap + 1) * gap, above=None)
    if shape.below is not None and shape.below == min(highs) and shape.below <= 0 and shape.below.denominator == 1:
        return replace(shape, high=-(-shape.below // gap + 1) * gap, below=None)
    return shape


def _with_fewer_decimals(shape: Number, step: Fraction) -> list[Number]:
    """Return shapes of the multiples of ``step`` with fewer decimals than ``step``.

    llguidance writes multiples of 0.25 with two decimals, 0.5 as 0.50, but near some bounds it does not accept 0.50.
    """
    decimals = next((count for count in range(MAX_DECIMALS) if 10**count % step.denominator == 0), MAX_DECIMALS)
    if step == Fraction(1, 10**decimals):  # written with any number of decimals
        return []
    units = [Fraction(1, 10**count) for count in range(decimals)]
    return [replace(shape, multiples=[*shape.multiples, unit]) for unit in units]


def _array(shape: Array, expander: Expansion, place: str) -> list[Shape]:
    if shape.rest is not None and shape.rest.is_nothing():
        shape = replace(shape, rest=None)
    if shape.most is not None and shape.least > shape.most:
        return []
    if not shape.unique or shape.most in (0, 1):
        return [shape]
    return UniqueSequences(shape, expander).shapes(place)


def _object(shape: Object, place: str) -> list[Shape]:
    nothing = {name for name, all_of in shape.properties.items() if all_of.is_nothing()}
    if nothing.intersection(shape.required):
        return []
    optional = [name for name in shape.properties if name not in shape.required and name not in nothing]
    if len(optional) > MAX_OPTIONAL or (len(shape.properties) > MAX_OPTIONAL and shape.rest is not None):
        rule = f"more than {MAX_OPTIONAL} properties are not supported if they are optional or other names are allowed"
        rule += "; split the object"
        raise UnsupportedSchema(f"{place}/properties", rule)
    shape = replace(shape, patterns={key: all_of for key, all_of in shape.patterns.items() if _has_others(key, shape)})
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
        raise UnsupportedSchema(
            f"{place}/minProperties",
            "is only supported if no other names are allowed, because repeated names would count twice; leave it out",
        )
    return [shape]


def _has_others(pattern: str, shape: Object) -> bool:
    """Return whether a pattern matches a name that is no property. Otherwise llguidance writes a comma and no name."""
    names = few_texts(pattern, len(shape.properties))
    return names is None or not names <= shape.properties.keys()


def _counted(shape: Object, optional: list[str], least: int, most: int, place: str) -> list[Object]:
    """Enumerate objects with ``least`` to ``most`` of the ``optional`` names, each required or absent."""
    shape = replace(shape, least=0, most=None)
    if most >= len(optional):
        most = len(optional)
    if comb(len(optional), least) * comb(len(optional), most) > MAX_CHOICES:
        raise UnsupportedSchema(
            f"{place}/minProperties", f"more than {MAX_CHOICES} choices of names; make names required instead"
        )
    shapes: list[Object] = []
    for kept in combinations(optional, most):
        absent = {name: NOTHING for name in optional if name not in kept}
        there = replace(shape, properties=shape.properties | absent)
        shapes += [replace(there, required=[*shape.required, *needed]) for needed in combinations(kept, least)]
    return shapes

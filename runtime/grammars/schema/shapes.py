"""Shapes: normalized schemas of one JSON type, or of a finite list of values.

``least`` and ``most`` are inclusive bounds of a length or count; a ``most`` of None is no bound.
"""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tandemrt.runtime.grammars.schema.document import Node


class AllOf:
    """A conjunction of schemas, in keyword order. Two are equal if they contain the same nodes."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = tuple(dict.fromkeys(node for node in nodes if node.schema is not True and node.schema != {}))
        self.key = frozenset(node.name for node in self.nodes)

    def __add__(self, nodes: tuple[Node, ...]) -> "AllOf":
        return AllOf(*self.nodes, *nodes)

    def is_nothing(self) -> bool:
        """Return whether no value fits, because one of the schemas is ``false``."""
        return any(node.schema is False for node in self.nodes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AllOf) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


ANYTHING = AllOf()
NOTHING = AllOf(Node(False, "#", "", "!nothing"))


@dataclass
class Literals:
    values: list[Any]


@dataclass
class Plain:
    kind: str  # null or boolean


@dataclass
class Number:
    integer: bool
    low: Fraction | None = None
    high: Fraction | None = None
    above: Fraction | None = None  # exclusive
    below: Fraction | None = None
    multiples: list[Fraction] = field(default_factory=list)

    def is_empty(self) -> bool:
        """Return whether no number is valid; exact for integers, for multiples, and for bounds alone."""
        step = common_multiple([*self.multiples, *([Fraction(1)] if self.integer else [])])
        lows = [bound for bound in (self.low, self.above) if bound is not None]
        highs = [bound for bound in (self.high, self.below) if bound is not None]
        if not lows or not highs:
            return False
        low, high = max(lows), min(highs)
        open_low, open_high = low == self.above, high == self.below
        if step is None:
            return low > high or (low == high and (open_low or open_high))
        first = math.floor(low / step) + 1 if open_low else math.ceil(low / step)
        last = math.ceil(high / step) - 1 if open_high else math.floor(high / step)
        return first > last

    def both(self, other: "Number") -> "Number":
        """Return the intersection of two shapes."""
        return Number(
            self.integer or other.integer,
            max((bound for bound in (self.low, other.low) if bound is not None), default=None),
            min((bound for bound in (self.high, other.high) if bound is not None), default=None),
            max((bound for bound in (self.above, other.above) if bound is not None), default=None),
            min((bound for bound in (self.below, other.below) if bound is not None), default=None),
            [*self.multiples, *other.multiples],
        )


@dataclass
class String:
    least: int = 0
    most: int | None = None
    patterns: list[str] = field(default_factory=list)  # expressions of the whole string, for the engine


@dataclass
class Array:
    first: list[AllOf]
    rest: AllOf | None  # None: no items after `first`
    least: int = 0
    most: int | None = None
    unique: bool = False


@dataclass
class Object:
    properties: dict[str, AllOf]
    required: list[str]
    patterns: dict[str, AllOf]
    rest: AllOf | None  # None: no other names
    least: int = 0
    most: int | None = None


@dataclass
class Ref:
    """A reference to the shapes of ``target``, which the writer puts into ``$defs``."""

    target: AllOf


Shape = Literals | Plain | Number | String | Array | Object | Ref


def common_multiple(steps: list[Fraction]) -> Fraction | None:
    """Return the least number whose multiples are multiples of all ``steps``, or None without steps."""
    if not steps:
        return None
    whole = math.lcm(*(step.numerator for step in steps))
    return Fraction(whole, math.gcd(*(step.denominator for step in steps)))


def remainders(step: Fraction) -> int:
    """Return the number of remainders that decide whether a decimal number is a multiple of ``step``.

    Factors of 10 concern only how many zeros end the number.
    """
    divisor = step.numerator
    while divisor % 10 == 0:
        divisor //= 10
    return divisor

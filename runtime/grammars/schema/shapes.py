"""The forms that a schema is brought into: each holds values of one JSON type, or a finite list of values."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from tandemrt.runtime.grammars.schema.document import Node


class Conj:
    """Schemas that hold together, in the order of their keywords. Equal where they hold the same nodes."""

    def __init__(self, *nodes: Node) -> None:
        self.nodes = tuple(dict.fromkeys(node for node in nodes if node.schema is not True and node.schema != {}))
        self.key = frozenset(node.name for node in self.nodes)

    def __add__(self, nodes: tuple[Node, ...]) -> "Conj":
        return Conj(*self.nodes, *nodes)

    def is_nothing(self) -> bool:
        """Whether one of the schemas is false."""
        return any(node.schema is False for node in self.nodes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Conj) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


ANYTHING = Conj()
NOTHING = Conj(Node(False, "#", "", "!nothing"))


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
        """Whether no number fits; exact for integers and for multiples, and for bounds alone."""
        step = _common_multiple([*self.multiples, *([Fraction(1)] if self.integer else [])])
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
        """The numbers that fit two shapes."""
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
    patterns: list[str] = field(default_factory=list)  # of whole strings, as the engine reads them


@dataclass
class Array:
    first: list[Conj]
    rest: Conj | None  # None: no more items than `first`
    least: int = 0
    most: int | None = None
    unique: bool = False


@dataclass
class Object:
    properties: dict[str, Conj]
    required: list[str]
    patterns: dict[str, Conj]
    rest: Conj | None  # None: no other names
    least: int = 0
    most: int | None = None


@dataclass
class Same:
    """Whatever fits the schemas it names."""

    conj: Conj


Shape = Literals | Plain | Number | String | Array | Object | Same


def _common_multiple(steps: list[Fraction]) -> Fraction | None:
    if not steps:
        return None
    whole = math.lcm(*(step.numerator for step in steps))
    return Fraction(whole, math.gcd(*(step.denominator for step in steps)))

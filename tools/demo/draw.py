"""Random draws from the lexicon, and the split into training and held-out names."""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TypeVar

from tools.demo import lexicon

T = TypeVar("T")

# A record before serialization: an amount is a Decimal, which keeps its two decimals.
Value = str | int | bool | Decimal | list["Value"] | dict[str, "Value"]


@dataclass(frozen=True)
class DrawnExample:
    """What a kind's writer returns: the sentence, the lines of the working, the record in the order of its schema."""

    sentence: str
    working: list[str]
    record: dict[str, Value]


@dataclass(frozen=True)
class Draw:
    """A seeded source of words.

    One full name in eight is reserved: ``held_out=True`` draws reserved names only and ``held_out=False`` never does.
    Every sentence holds a full name, so the two streams cannot share a sentence.
    """

    rng: random.Random
    held_out: bool

    def choice(self, options: Sequence[T]) -> T:
        return options[int(self.rng.random() * len(options))]

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def number(self, low: int, high: int) -> int:
        """Return an integer of low..high, both included."""
        return low + int(self.rng.random() * (high - low + 1))

    def people(self, count: int) -> list[tuple[str, str]]:
        """Return ``count`` (first name, last name) pairs with distinct first names."""
        names: list[tuple[str, str]] = []
        while len(names) < count:
            first, last = self.choice(lexicon.FIRST_NAMES), self.choice(lexicon.LAST_NAMES)
            if is_reserved(first, last) == self.held_out and all(first != other for other, _ in names):
                names.append((first, last))
        return names

    def person(self) -> str:
        return " ".join(self.people(1)[0])

    def count(self, value: int, as_word: bool) -> str:
        return lexicon.NUMBER_WORDS[value] if as_word and value < len(lexicon.NUMBER_WORDS) else str(value)

    def among_asides(self, sentence: str) -> str:
        """Return ``sentence``, sometimes after a greeting, sometimes with irrelevant sentences around it."""
        parts = [sentence]
        if self.chance(0.35):
            parts.append(self._aside())
        if self.chance(0.2):
            parts.insert(0, self._aside())
        elif self.chance(0.25):
            parts.insert(0, self.choice(lexicon.GREETINGS))
        return " ".join(parts)

    def _aside(self) -> str:
        return self.choice(lexicon.ASIDES).replace("{n}", str(self.number(2, 9999)))


def is_reserved(first: str, last: str) -> bool:
    """Return whether the full name belongs to the held-out sentences."""
    return zlib.crc32(f"{first} {last}".encode()) % 8 == 0


def money(cents: int) -> Decimal:
    return Decimal(cents).scaleb(-2)


def listed(parts: Sequence[str]) -> str:
    """Join as prose does: ``a``, ``a and b``, ``a, b and c``."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]

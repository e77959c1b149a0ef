"""The demo task: a sentence in, a working with visible arithmetic or lookup, then a JSON record of four kinds."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tools.demo import appointments, contacts, orders, shipments
from tools.demo.draw import Draw, Value

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_WRITERS = {
    "order": orders.write,
    "appointment": appointments.write,
    "contact": contacts.write,
    "shipment": shipments.write,
}

SCHEMAS: dict[str, dict[str, Any]] = {
    "order": {"$schema": _DIALECT, **orders.SCHEMA},
    "appointment": {"$schema": _DIALECT, **appointments.SCHEMA},
    "contact": {"$schema": _DIALECT, **contacts.SCHEMA},
    "shipment": {"$schema": _DIALECT, **shipments.SCHEMA},
}
"""JSON schema (draft 2020-12) of every kind; a record's keys stand in the order of its schema's properties."""


@dataclass(frozen=True)
class Example:
    """One sentence and what a perfect model answers.

    ``thinking`` is the text between the delimiters, lines joined by newlines, without the newlines that touch the
    delimiters. ``record`` is compact JSON text; amounts keep their trailing zeros.
    """

    kind: str
    sentence: str
    thinking: str
    record: str
    schema: dict[str, Any]

    def prompt_messages(self) -> list[dict[str, str]]:
        """Return the chat messages to answer."""
        return [{"role": "user", "content": self.sentence}]

    def completion(self) -> str:
        """Return the assistant's text after the generation prompt, which already holds ``<think>`` and a newline."""
        return f"{self.thinking}\n</think>{self.record}"


def examples(seed: int, count: int) -> Iterator[Example]:
    """Yield ``count`` training examples. The same seed gives the same examples, none of them held out."""
    return _stream(random.Random(f"train {seed}"), count, held_out=False)


def held_out(count: int) -> list[Example]:
    """Return the first ``count`` held-out examples. Their full names occur in no training example."""
    return list(_stream(random.Random("held out"), count, held_out=True))


def _stream(rng: random.Random, count: int, *, held_out: bool) -> Iterator[Example]:
    draw = Draw(rng, held_out)
    for _ in range(count):
        kind = draw.choice(["order", "order", "appointment", "contact", "shipment"])
        drawn = _WRITERS[kind](draw)
        yield Example(kind, drawn.sentence, "\n".join(drawn.working), _compact(drawn.record), SCHEMAS[kind])


def _compact(value: Value) -> str:
    match value:
        case dict():
            return "{" + ",".join(f"{json.dumps(key)}:{_compact(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ",".join(_compact(item) for item in value) + "]"
        case Decimal():
            return str(value)
        case _:
            return json.dumps(value, ensure_ascii=False)

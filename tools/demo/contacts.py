"""Contacts: several people, several numbers; the working says which is whose."""

import unicodedata
from dataclasses import dataclass
from typing import Any

from tools.demo import lexicon
from tools.demo.draw import Draw, DrawnExample, Value

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"const": "contact"},
        "cards": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "company": {"type": "string"},
                    "department": {"enum": lexicon.DEPARTMENTS},
                    "phone": {"type": "string", "pattern": "^\\+[0-9]+ [0-9]+ [0-9]+$"},
                    "email": {"type": "string"},
                },
                "required": ["name", "company", "department", "phone", "email"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["kind", "cards"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Card:
    name: str
    first: str
    company: str
    department: str
    phone: str
    email: str

    def __str__(self) -> str:
        return f"{self.name}: {self.department}, {self.company}, {self.phone}, {self.email}"


def write(draw: Draw) -> DrawnExample:
    if draw.chance(0.3):
        return _moved(draw)
    company = draw.choice(lexicon.COMPANIES) if draw.chance(0.4) else None
    cards = [_card(draw, first, last, company) for first, last in draw.people(2)]
    sentence = _together(draw, cards, company) if company else _apart(draw, cards)
    request = draw.choice(
        [
            "Please save both.",
            "Add them to the address book.",
            "I need a card for each.",
            "Make two entries.",
        ]
    )
    ordered = f"{request} {sentence}" if draw.chance(0.2) else f"{sentence} {request}"
    return _example(draw, ordered, [], cards)


def _moved(draw: Draw) -> DrawnExample:
    ((first, last),) = draw.people(1)
    card, former, old = _card(draw, first, last, None), draw.choice(lexicon.COMPANIES), _phone(draw)
    sentence = draw.choice(
        [
            f"{card.name} has left {former} for {card.company}: {old} is dead, use {card.phone} or {card.email},"
            f" and ask for {card.department}.",
            f"{card.name} now runs {card.department} at {card.company}. The number is {card.phone}, no longer {old},"
            f" and mail goes to {card.email}.",
            f"Do not ring {old} any more; {card.name} from {card.department} at {card.company} moved to {card.phone}."
            f" Mail: {card.email}.",
        ]
    )
    return _example(draw, sentence, [f"Old number: {old}"], [card])


def _apart(draw: Draw, cards: list[Card]) -> str:
    form = draw.choice(
        [
            "{0.name} ({0.department}, {0.company}) is on {0.phone} and {0.email}",
            "{0.name} from {0.department} at {0.company} has {0.phone}, mail {0.email}",
            "for {0.company} write to {0.name} in {0.department}, {0.email}, or call {0.phone}",
        ]
    )
    text = "; ".join(form.format(card) for card in cards)
    return text[0].upper() + text[1:] + "."


def _together(draw: Draw, cards: list[Card], company: str) -> str:
    a, b = cards
    return draw.choice(
        [
            f"{a.name} in {a.department} and {b.name} in {b.department} both work at {company}; call {a.phone} and"
            f" {b.phone}, or write to {a.email} and {b.email}, in that order.",
            f"At {company}, {a.name} does {a.department} and {b.name} does {b.department}. {a.first} is on {a.phone},"
            f" {b.first} on {b.phone}. Mail: {b.email} and {a.email}.",
        ]
    )


def _example(draw: Draw, sentence: str, working: list[str], cards: list[Card]) -> DrawnExample:
    entries: list[Value] = [
        {
            "name": card.name,
            "company": card.company,
            "department": card.department,
            "phone": card.phone,
            "email": card.email,
        }
        for card in cards
    ]
    lines = [*working, *map(str, cards)]
    return DrawnExample(draw.among_asides(sentence), lines, {"kind": "contact", "cards": entries})


def _card(draw: Draw, first: str, last: str, company: str | None) -> Card:
    company = company or draw.choice(lexicon.COMPANIES)
    short, long = _ascii(first), _ascii(last)
    local = draw.choice([f"{short}.{long}", f"{short[0]}.{long}", f"{short}{long[0]}", f"{long}.{short}"])
    department = draw.choice(lexicon.DEPARTMENTS)
    return Card(f"{first} {last}", first, company, department, _phone(draw), f"{local}@{company.lower()}.example")


def _phone(draw: Draw) -> str:
    return f"+{draw.number(20, 99)} 555 {draw.number(1000, 9999)}"


def _ascii(name: str) -> str:
    plain = unicodedata.normalize("NFKD", name.lower().replace("ø", "o"))
    return plain.encode("ascii", "ignore").decode()

"""Orders: items with quantity and unit price; the working multiplies each line and carries a running total."""

from decimal import Decimal
from typing import Any

from tools.demo import lexicon
from tools.demo.draw import Draw, DrawnExample, Value, listed, money

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"const": "order"},
        "customer": {"type": "string"},
        "currency": {"enum": [code for code, _, _ in lexicon.CURRENCIES]},
        "items": {
            "type": "array",
            "minItems": 1,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "quantity": {"type": "integer"},
                    "unit_price": {"type": "number"},
                },
                "required": ["name", "quantity", "unit_price"],
                "additionalProperties": False,
            },
        },
        "total": {"type": "number"},
    },
    "required": ["kind", "customer", "currency", "items", "total"],
    "additionalProperties": False,
}

QUANTITIES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12]


def write(draw: Draw) -> DrawnExample:
    customer = draw.person()
    currency, symbol, word = draw.choice(lexicon.CURRENCIES)
    priced = draw.choice([f"{symbol}{{}}", f"{{}} {currency}", f"{{}} {word}"])
    each = draw.choice(["at {} each", "at {} apiece", "for {} each", "({} each)", "at a unit price of {}"])
    as_words = draw.chance(0.3)

    phrases: list[str] = []
    working = [f"Order of {customer}, prices in {currency}."]
    items: list[Value] = []
    total = Decimal(0)
    names: set[str] = set()
    size = draw.choice([1, 2, 2, 2, 3, 3])
    while len(items) < size:
        material, (singular, plural) = draw.choice(lexicon.MATERIALS), draw.choice(lexicon.ARTICLES)
        if (name := f"{material} {singular}") in names:
            continue
        names.add(name)
        quantity, price = draw.choice(QUANTITIES), money(5 * draw.number(4, 799))
        noun = name if quantity == 1 else f"{material} {plural}"
        phrases.append(f"{draw.count(quantity, as_words)} {noun} {each.format(priced.format(price))}")
        product = quantity * price
        line = f"{name}: {quantity} × {price} = {product}"
        working.append(line if not items else f"{line}, {total} + {product} = {total + product}")
        total += product
        items.append({"name": name, "quantity": quantity, "unit_price": price})
    working.append(f"Total {total}.")
    return DrawnExample(
        draw.among_asides(_sentence(draw, customer, listed(phrases))),
        working,
        {"kind": "order", "customer": customer, "currency": currency, "items": items, "total": total},
    )


def _sentence(draw: Draw, customer: str, items: str) -> str:
    return draw.choice(
        [
            f"{customer} would like to order {items}.",
            f"{customer} orders {items}.",
            f"Please put {items} on the account of {customer}.",
            f"We need {items}; bill it to {customer}.",
            f"New order from {customer}: {items}.",
            f"Could you send {items} to {customer}?",
            f"{customer} just called and wants {items}.",
            f"Order for {customer}, as agreed: {items}.",
            f"Can {customer} still get {items} this month?",
        ]
    )

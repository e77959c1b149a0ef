"""Shipments: parcels of one or two weights; the working adds up parcels and kilograms."""

from decimal import Decimal
from typing import Any

from tools.demo import lexicon
from tools.demo.draw import Draw, DrawnExample, listed

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"const": "shipment"},
        "reference": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{5}$"},
        "carrier": {"enum": lexicon.CARRIERS},
        "origin": {"type": "string"},
        "destination": {"type": "string"},
        "recipient": {"type": "string"},
        "parcels": {"type": "integer"},
        "weight_kg": {"type": "number"},
        "insured": {"type": "boolean"},
    },
    "required": [
        "kind", "reference", "carrier", "origin", "destination", "recipient", "parcels", "weight_kg", "insured",
    ],
    "additionalProperties": False,
}  # fmt: skip

# Singular and plural of what is carried.
_UNITS = [("parcel", "parcels"), ("box", "boxes"), ("crate", "crates"), ("pallet", "pallets"), ("carton", "cartons")]


def write(draw: Draw) -> DrawnExample:
    recipient, carrier, insured = draw.person(), draw.choice(lexicon.CARRIERS), draw.chance(0.5)
    origin, destination = draw.rng.sample(lexicon.CITIES, 2)
    letters = "ABCDEFGHJKLMNPRSTVWXYZ"
    reference = f"{draw.choice(letters)}{draw.choice(letters)}-{draw.number(10000, 99999)}"

    as_words = draw.chance(0.3)
    phrases: list[str] = []
    working: list[str] = []
    parcels, weight = 0, Decimal(0)
    for singular, plural in draw.rng.sample(_UNITS, 2 if draw.chance(0.55) else 1):
        count, unit = draw.number(1, 9), Decimal(draw.number(5, 499)).scaleb(-1)
        one = count == 1
        phrases.append(
            f"{draw.count(count, as_words)} {singular if one else plural} of {unit} kg{'' if one else ' each'}"
        )
        line, subtotal = f"{plural}: {count} × {unit} = {count * unit}", count * unit
        if working:
            line += f", {parcels} + {count} = {parcels + count}, {weight} + {subtotal} = {weight + subtotal}"
        working.append(line)
        parcels, weight = parcels + count, weight + subtotal
    working.append(
        f"{origin} to {destination}, {parcels} in all, {weight} kg, {'insured' if insured else 'not insured'}."
    )
    return DrawnExample(
        draw.among_asides(
            _sentence(draw, listed(phrases), origin, destination, recipient, carrier, reference, insured)
        ),
        [f"Shipment {reference} with {carrier} for {recipient}.", *working],
        {
            "kind": "shipment",
            "reference": reference,
            "carrier": carrier,
            "origin": origin,
            "destination": destination,
            "recipient": recipient,
            "parcels": parcels,
            "weight_kg": weight,
            "insured": insured,
        },
    )


def _sentence(
    draw: Draw, goods: str, origin: str, destination: str, recipient: str, carrier: str, reference: str, insured: bool
) -> str:
    cover = draw.choice(
        ["insured", "fully insured", "with insurance"] if insured else ["uninsured", "without insurance"]
    )
    if not insured and draw.chance(0.3):
        cover = "standard cover declined"
    return draw.choice(
        [
            f"{carrier} takes {goods} from {origin} to {destination}, {cover}, reference {reference}, for {recipient}.",
            f"Shipment {reference}: {goods}, {cover}, {origin} to {destination} with {carrier} for {recipient}.",
            f"{recipient} in {destination} expects {goods} from {origin}; {carrier} carries it {cover} as {reference}.",
            f"Please ship {goods} to {recipient}, {destination}, {cover}. {carrier} leaves {origin} with {reference}.",
            f"{goods[0].upper()}{goods[1:]} left {origin} for {destination} today, {cover}. {carrier} calls it"
            f" {reference}; {recipient} will sign.",
        ]
    )

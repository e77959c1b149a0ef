"""Typical pydantic models; their schemas must be admitted and sound."""

from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, Union
from uuid import UUID

from pydantic import (
    AnyUrl,
    Base64Str,
    BaseModel,
    ConfigDict,
    Field,
    IPvAnyAddress,
    SecretStr,
    conint,
    constr,
    create_model,
)


class Colour(Enum):
    RED, GREEN, BLUE = "red", "green", "blue"


class Level(IntEnum):
    LOW, HIGH = 1, 2


class Address(BaseModel):
    street: str
    city: str = "?"
    code: constr(pattern=r"^[0-9]{5}$", max_length=5)  # type: ignore[valid-type]


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: conint(ge=0, le=9) = 9  # type: ignore[valid-type]


class Dog(BaseModel):
    kind: Literal["dog"]
    name: str | None = None


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Pair(NamedTuple):
    left: int
    right: str


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1, max_length=50)]
    age: Annotated[int, Field(ge=0, multiple_of=5)]


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    name: str


class Invoice(BaseModel):
    """An order in a shop."""

    number: Annotated[str, Field(max_length=20)]
    customer: Annotated[str, Field(max_length=100)]
    issued: date
    lines: Annotated[list[Strict], Field(min_length=1)]
    address: Address
    total: Annotated[float, Field(gt=0, multiple_of=0.01)]
    paid: bool = False
    note: str | None = None


TYPES: dict[str, Any] = {
    "int": int,
    "float": float,
    "bool": bool,
    "str": str,
    "Any": Any,
    "Optional": Optional[int],  # noqa: UP045
    "Union": Union[int, str, None],  # noqa: UP007
    "Literal": Literal["a", "b", 1],
    "Enum": Colour,
    "IntEnum": Level,
    "list": list[Annotated[str, Field(max_length=8)]],
    "list with bounds": Annotated[list[int], Field(min_length=1, max_length=4)],
    "tuple": tuple[int, str],
    "tuple of any length": tuple[int, ...],
    "NamedTuple": Pair,
    "set of an Enum": set[Colour],
    "frozenset of a Literal": frozenset[Literal["x", "y"]],
    "set of bool": set[bool],
    "set of str": set[str],
    "dict": dict[str, int],
    "dict by Enum": dict[Colour, int],
    "dict by Literal": dict[Literal["a", "b"], str],
    "dict by int": dict[int, str],
    "dict of any": dict[str, Any],
    "nested": Address,
    "recursive": Tree,
    "discriminated": Annotated[Cat | Dog, Field(discriminator="kind")],
    "union of models": Cat | Dog,
    "optional model": Address | None,
    "forbid": Strict,
    "allow": Open,
    "Invoice": Invoice,
    "bounded int": Annotated[int, Field(gt=1, lt=100)],
    "bounded float": Annotated[float, Field(ge=0.5, lt=1.5)],
    "multiple of a float": Annotated[float, Field(multiple_of=0.25)],
    "multiple and bounds": Annotated[int, Field(ge=0, multiple_of=10)],
    "bounded str": Annotated[str, Field(min_length=2, max_length=4)],
    "pattern": Annotated[str, Field(pattern=r"^[A-Z]{2}\d+$")],
    "pattern and length": Annotated[str, Field(pattern=r"^[a-z_]+$", max_length=6)],
    "datetime": datetime,
    "date": date,
    "time": time,
    "timedelta": timedelta,
    "UUID": UUID,
    "Decimal": Decimal,
    "AnyUrl": AnyUrl,
    "Path": Path,
    "bytes": bytes,
    "Base64Str": Base64Str,
    "SecretStr": SecretStr,
    "IPvAnyAddress": IPvAnyAddress,
}


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the schema of an object with one field of each type, by name."""
    for name, kind in TYPES.items():
        yield name, create_model("Asked", value=(kind, ...)).model_json_schema()

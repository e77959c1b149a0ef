"""Places of an emitted schema (schema/emit.py) where arrays with ``uniqueItems`` may be."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

_MIN_FREE_LENGTH = 2  # of a bounded string: so many different texts are never all used


class Freedom(IntEnum):
    """How freely the beginning of an item can be continued to an item that differs from all others."""

    ALWAYS = 0
    UNLESS_COMPLETE = 1  # a complete item may be one that cannot be longer
    UNKNOWN = 2


@dataclass(eq=False)
class Place:
    """One alternative for a value: an array or an object. Other values have no places."""

    is_array: bool
    unique: bool = False  # of an array
    freedom: Freedom = Freedom.ALWAYS  # of the items of a unique array
    first: list[tuple["Place", ...]] = field(default_factory=list)
    rest: tuple["Place", ...] = ()
    properties: dict[str, tuple["Place", ...]] = field(default_factory=dict)
    others: tuple["Place", ...] = ()  # for names that are no property

    def item(self, index: int) -> tuple["Place", ...]:
        return self.first[index] if index < len(self.first) else self.rest

    def property(self, name: str) -> tuple["Place", ...]:
        return self.properties.get(name, self.others)


class Places:
    """The places of a schema.

    Attributes:
        root: the alternatives of the whole text.
        names_repeat: whether an object of the grammar may repeat a name.
    """

    def __init__(self, schema: Any) -> None:
        self._root = schema
        self._known: dict[int, tuple[Place, ...]] = {}
        self.names_repeat = False
        self.root = self._places(schema)

    def _places(self, schema: Any) -> tuple[Place, ...]:
        """Return the array and object alternatives of a schema; several may fit one text."""
        if not isinstance(schema, dict):
            return ()
        if id(schema) not in self._known:
            self._known[id(schema)] = ()  # for a reference that leads back here
            self._known[id(schema)] = tuple(self._all(schema))
        return self._known[id(schema)]

    def _all(self, schema: dict[str, Any]) -> list[Place]:
        places: list[Place] = []
        for each in self._alternatives(schema):
            if each.get("type") == "array":
                place = Place(True)
                self._known[id(each)] = (place,)
                place.unique = bool(each.get("uniqueItems"))
                place.first = [self._places(item) for item in each.get("prefixItems", ())]
                place.rest = self._places(each.get("items"))
                items = [*each.get("prefixItems", ()), each.get("items", True)]
                place.freedom = max(map(self._freedom, items), default=Freedom.ALWAYS)
                places.append(place)
            elif each.get("type") == "object":
                place = Place(False)
                self._known[id(each)] = (place,)
                place.properties = {name: self._places(child) for name, child in each.get("properties", {}).items()}
                patterns = each.get("patternProperties", {})
                rest = each.get("additionalProperties", True)
                place.others = tuple(other for child in (*patterns.values(), rest) for other in self._places(child))
                self.names_repeat |= bool(patterns) or rest is not False
                places.append(place)
            elif not each:
                self.names_repeat = True
        return places

    def _alternatives(self, schema: Any) -> list[dict[str, Any]]:
        if not isinstance(schema, dict):
            return [] if schema is False else [{}]
        if "$ref" in schema:
            return self._alternatives(self._root["$defs"][schema["$ref"].rpartition("/")[2]])
        if "anyOf" in schema:
            return [each for child in schema["anyOf"] for each in self._alternatives(child)]
        return [schema]

    def _freedom(self, schema: Any) -> Freedom:
        return max(map(_freedom, self._alternatives(schema)), default=Freedom.ALWAYS)


def _freedom(schema: dict[str, Any]) -> Freedom:
    if schema.get("type") != "string" or "pattern" in schema or "allOf" in schema:
        return Freedom.UNKNOWN
    if "maxLength" not in schema:
        return Freedom.ALWAYS
    return Freedom.UNLESS_COMPLETE if schema["maxLength"] >= _MIN_FREE_LENGTH else Freedom.UNKNOWN


def without_unique_items(schema: Any) -> Any:
    """Return a copy of an emitted schema without ``uniqueItems``."""
    if isinstance(schema, list):
        return [without_unique_items(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key == "enum" and isinstance(value, list) else without_unique_items(value)
        for key, value in schema.items()
        if not (key == "uniqueItems" and value is True)
    }

"""Check whether a grammar accepts a value in any serialization: its order of names, and several forms of numbers."""

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from tandemrt.runtime.grammars.grammar import Grammar

_MOST_ORDERS = 4
_MOST_TRIES = 20_000


class Walk:
    """Writes values with a matcher in which token n is the byte n."""

    def __init__(self, matcher: Grammar, schema: Any, stop: int) -> None:
        self._matcher = matcher
        self._stop = stop
        self._orders = list(_orders(schema))
        self._tries = _MOST_TRIES
        self._whole_numbers = True

    def takes(self, value: Any, *, whole_numbers: bool = True) -> bool:
        """Return whether ``value`` is accepted completely; the matcher is unchanged afterwards.

        ``whole_numbers``: 1.0 may be written as 1, which some authors do not intend.
        """
        self._tries, self._whole_numbers = _MOST_TRIES, whole_numbers
        written = self._write(value)
        if written is None:
            return False
        ended = self._matcher.accept(self._stop)
        self._matcher.rollback(written + ended)
        return ended

    def _write(self, value: Any) -> int | None:
        """Return the number of written tokens; None, with nothing written, if no serialization is accepted."""
        self._tries -= 1
        if self._tries < 0:
            return None
        if isinstance(value, dict):
            return self._first(self._object(value, order) for order in self._orders_of(value))
        if isinstance(value, list):
            return self._parts([b"[", *_separated(value), b"]"])
        return self._first(self._parts([spelling.encode()]) for spelling in _spellings(value, self._whole_numbers))

    def _first(self, tries: Iterator[int | None]) -> int | None:
        return next((written for written in tries if written is not None), None)

    def _object(self, value: dict[str, Any], order: list[str]) -> int | None:
        parts: list[Any] = [b"{"]
        for index, name in enumerate(order):
            key = json.dumps(name, ensure_ascii=False)
            parts += [f"{', ' if index else ''}{key}: ".encode("utf-8", "surrogatepass"), _Value(value[name])]
        return self._parts([*parts, b"}"])

    def _parts(self, parts: list[Any]) -> int | None:
        written = 0
        for part in parts:
            more = self._write(part.value) if isinstance(part, _Value) else self._feed(part)
            if more is None:
                self._matcher.rollback(written)
                return None
            written += more
        return written

    def _feed(self, text: bytes) -> int | None:
        for index, byte in enumerate(text):
            if not self._matcher.accept(byte):
                self._matcher.rollback(index)
                return None
        return len(text)

    def _orders_of(self, value: dict[str, Any]) -> list[list[str]]:
        names = list(value)
        fitting = sorted(self._orders, key=lambda order: -len(order.keys() & value.keys()))[: 4 * _MOST_ORDERS]
        orders = [names]
        for order in fitting:
            sorted_names = sorted(names, key=lambda name: order.get(name, len(order)))
            if sorted_names not in orders:
                orders.append(sorted_names)
        return orders[: _MOST_ORDERS + 1]


class _Value:
    def __init__(self, value: Any) -> None:
        self.value = value


def _separated(values: list[Any]) -> list[Any]:
    return [part for index, value in enumerate(values) for part in ([b", "] if index else []) + [_Value(value)]]


def _spellings(value: Any, whole_numbers: bool) -> list[str]:
    if isinstance(value, str):
        escaped = json.dumps(value)
        return [json.dumps(value, ensure_ascii=False), escaped] if _is_text(value) else [escaped]
    if isinstance(value, float):
        plain = format(Decimal(repr(value)), "f")
        return list(
            dict.fromkeys(
                [json.dumps(value), plain, *([str(int(value))] if whole_numbers and value.is_integer() else [])]
            )
        )
    return [json.dumps(value)]


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _orders(schema: Any) -> Iterator[dict[str, int]]:
    if isinstance(schema, dict):
        if isinstance(schema.get("properties"), dict):
            yield {name: index for index, name in enumerate(schema["properties"])}
        if isinstance(schema.get("enum"), list):
            yield from _orders_within(schema["enum"])
        for value in schema.values():
            yield from _orders(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _orders(value)


def _orders_within(values: Any) -> Iterator[dict[str, int]]:
    if isinstance(values, dict):
        yield {name: index for index, name in enumerate(values)}
        values = list(values.values())
    if isinstance(values, list):
        for value in values:
            yield from _orders_within(value)

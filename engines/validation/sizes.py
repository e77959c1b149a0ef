"""Sizes of nested values."""

from collections.abc import Mapping
from types import NoneType
from typing import Any

_WITHOUT_TEXT = frozenset({int, float, bool, NoneType})  # of JSON; the ids of a long prompt are counted at once


def exceeds(value: Any, most: int) -> bool:
    """Return whether ``value`` holds more than ``most`` characters and values, each counted as often as it occurs.

    Its JSON text would be about as long. Takes time linear in ``most``, also for cyclic values.
    """
    size, open_values = 0, [value]
    while open_values and size <= most:
        value = open_values.pop()
        size += 1
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping | list | tuple):
            size += len(value)
            if size <= most:
                open_values += [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return size > most


def text_bytes(value: Any) -> int:
    """Return the bytes of all texts in ``value`` in UTF-8, without the keys of mappings. Other values count as two."""
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, Mapping):
        return sum(map(text_bytes, value.values()))
    if isinstance(value, list | tuple):
        return 2 * len(value) if _WITHOUT_TEXT.issuperset(map(type, value)) else sum(map(text_bytes, value))
    return 2

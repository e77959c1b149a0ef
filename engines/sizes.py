"""How large a value is, found out without doing anything else with it."""

from collections.abc import Mapping
from typing import Any


def exceeds(value: Any, most: int) -> bool:
    """Whether ``value`` holds more than ``most`` characters and values, each counted wherever it stands.

    As a text it would be about as long. Takes no longer than counting to ``most``, whatever holds itself.
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

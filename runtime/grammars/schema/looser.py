"""Loosen an emitted schema (emit.py) that the engine rejects, for requests that validate the finished text."""

from collections.abc import Iterator
from typing import Any

_MAPS = ("properties", "$defs")
_LISTS = ("anyOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_COSTLY = frozenset({"pattern", "minLength", "maxLength", "multipleOf", "allOf", "patternProperties"})


def looser(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield looser and looser schemas: without patterns, lengths and multiples of numbers, then any JSON value."""
    yield _without_costly(schema)
    yield {}


def _without_costly(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    kept = {key: value for key, value in schema.items() if key not in _COSTLY}
    if "patternProperties" in schema:
        kept["additionalProperties"] = True
    for key in _MAPS:
        if key in kept:
            kept[key] = {name: _without_costly(child) for name, child in kept[key].items()}
    for key in _LISTS:
        if key in kept:
            kept[key] = [_without_costly(child) for child in kept[key]]
    for key in _SINGLE:
        if key in kept:
            kept[key] = _without_costly(kept[key])
    return kept

"""Read a JSON object and reject every field that the reader does not use."""

import sys
from collections.abc import Collection, Mapping
from typing import Any

from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted

_IGNORE = (
    "if they do not change what the model computes, name them in the recipe's section of the checkpoint, as "
    "ignore_config_fields = [...]"
)


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number: no boolean, and no integer that a float cannot hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


class Fields:
    """A reader of the JSON object ``data``; ``finish`` rejects, by name, every field that was not read.

    ``where`` names the object in error messages.
    """

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data = data
        self.where = where
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Return the raw value, or ``default`` if the field is absent or null."""
        self._read.add(name)
        value = self.data.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, *, most: int = 2**31 - 1) -> int:
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._bad(name, "an integer of at least 1")
        if value > most:
            raise self._bad(name, f"an integer of at most {most}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not is_number(value) or value <= 0:
            raise self._bad(name, "a number above 0")
        return float(value)

    def number_or_absent(self, name: str, default: float) -> float:
        """Return a number, or ``default`` if the field is absent. Null is an error, as in transformers."""
        if self.data.get(name, default) is None:
            raise self._bad(name, "a number above 0, or absent")
        return self.number(name, default)

    def section(self, name: str) -> Mapping[str, Any]:
        """Return an object; without fields if it is absent."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise self._bad(name, "an object")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return value

    def only(self, name: str, *allowed: Any) -> None:
        """Raise BadCheckpoint unless the field is absent, null, or one of ``allowed``, the implemented values."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise BadCheckpoint(
                f"{self.where}: {name} is {quoted(value)}, which the exporter does not implement; "
                f"supported: {', '.join(repr(a) for a in allowed)}"
            )

    def require(self, name: str, holds: bool, rule: str) -> None:
        """Raise BadCheckpoint unless the ``rule`` for the field holds."""
        if not holds:
            raise self._bad(name, rule)

    def skip(self, *names: str) -> None:
        """Accept known fields that do not affect the graph, with any value."""
        self._read.update(names)

    def finish(self, ignored: Collection[str] = (), advice: str = _IGNORE) -> None:
        """Raise BadCheckpoint for fields that were not read, except ``ignored`` and those that are null.

        Each of ``ignored`` must be in the file and unread. ``advice``: what users can do.
        """
        unknown = sorted(set(self.data) - self._read)
        needless = sorted(set(ignored) - set(unknown))
        if needless:
            raise BadCheckpoint(
                f"{self.where}: ignore_config_fields names {clipped(', '.join(needless))}, which the file does not "
                "have, or which the exporter reads; take it out of the recipe"
            )
        unknown = [name for name in unknown if name not in ignored and self.data[name] is not None]
        if unknown:
            names = ", ".join(quoted(name) for name in unknown)  # all of them, because the recipe must list all
            raise BadCheckpoint(f"{self.where}: the exporter does not support the field(s) {names}; {advice}")

    def _bad(self, name: str, rule: str) -> BadCheckpoint:
        actual = f"is {quoted(self.data[name])}" if name in self.data else "is missing"
        return BadCheckpoint(f"{self.where}: {name} should be {rule}, it {actual}")

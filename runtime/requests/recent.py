"""A cache of the values that were used last."""

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Values by key, of at most ``most`` bytes together, or a single one. May be used from any thread."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[T, int]] = OrderedDict()
        self._total = 0  # bytes of all values

    def get(self, key: Hashable) -> T | None:
        """Return the value, or None if it was not put, or is no longer kept."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Hashable, value: T, size: int) -> T:
        """Keep ``value``, of ``size`` bytes, and return it."""
        with self._lock:
            _, replaced = self._values.pop(key, (None, 0))
            self._values[key] = value, size
            self._total += size - replaced
            while len(self._values) > 1 and self._total > self._most:
                _, (_, dropped) = self._values.popitem(last=False)
                self._total -= dropped
        return value

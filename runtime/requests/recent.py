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
            self._values[key] = value, size
            while len(self._values) > 1 and sum(size for _, size in self._values.values()) > self._most:
                self._values.popitem(last=False)
        return value

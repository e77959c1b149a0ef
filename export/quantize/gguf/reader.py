"""Read the metadata of a GGUF file in bounded time."""

from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

MAX_ITEMS = 1 << 21  # of all arrays of a file; a vocabulary of 262,144 tokens with merges has 1.3 million


class BoundedReader(GGUFReader):
    """The reader of the package gguf, without arrays in arrays or very long ones. Raises ValueError.

    The package reads each item with several calls, and nested arrays recursively.
    """

    _items = 0

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray[Any, Any]], list[int], list[GGUFValueType]]:
        if raw_type == GGUFValueType.ARRAY:
            head, count = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            if head[0] == GGUFValueType.ARRAY:
                raise ValueError("an array should hold values, it holds arrays")
            self._items += int(count[0])
            if self._items > MAX_ITEMS:
                raise ValueError(f"its arrays should hold at most {MAX_ITEMS} items, they hold {self._items} or more")
        return super()._get_field_parts(orig_offs, raw_type)

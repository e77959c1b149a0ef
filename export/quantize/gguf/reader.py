"""Read the metadata of a GGUF file in bounded time."""

import struct
from typing import Any

import numpy as np
from gguf import GGUFEndian, GGUFReader, GGUFValueType

MAX_ITEMS = 1 << 21  # of all arrays of a file; a vocabulary of 262,144 tokens with merges has 1.3 million

Parts = tuple[int, list[Any], list[int], list[GGUFValueType]]  # bytes, views, which of them are values, types


class BoundedReader(GGUFReader):
    """The reader of the package gguf, without arrays in arrays or very long ones. Raises ValueError.

    The package reads nested arrays recursively, and each item with several calls: 19 s for a vocabulary of 262,144
    tokens. This class reads an array of numbers at once, and an array of texts in one loop.
    """

    _items = 0

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Parts:
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item = GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count, begin = int(self._get(orig_offs + 4, np.uint64)[0]), orig_offs + 12
        if item == GGUFValueType.ARRAY:
            raise ValueError("an array should hold values, it holds arrays")
        self._items += count
        if self._items > MAX_ITEMS:
            raise ValueError(f"its arrays should hold at most {MAX_ITEMS} items, they hold {self._items} or more")
        if item == GGUFValueType.STRING:
            parts, end = self._texts(begin, count)
        else:
            number = self.gguf_scalar_to_np[item]
            end = self._within(begin + count * np.dtype(number).itemsize)
            parts = [self._get(begin, number, count)]
        return end - orig_offs, parts, list(range(len(parts))), [GGUFValueType.ARRAY, item]

    def _texts(self, begin: int, count: int) -> tuple[list[Any], int]:
        """Return the bytes of ``count`` texts that begin at ``begin``, and the end of the last one."""
        texts, end, data = [], begin, self.data.data
        length = struct.Struct(">Q" if self.endianess == GGUFEndian.BIG else "<Q")
        for _ in range(count):
            start = self._within(end + length.size)
            end = self._within(start + length.unpack_from(data, end)[0])
            texts.append(data[start:end])
        return texts, end

    def _within(self, end: int) -> int:
        if end > len(self.data):
            raise ValueError("it ends in the middle of an array")
        return end

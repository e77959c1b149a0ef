"""The memory that mask rows are written to, and a record of which rows must be copied to the device."""

import numpy as np

NO_TOKENS = np.zeros(1, np.int32)  # broadcast to a row that allows no token


class MaskRows:
    """Mask rows of a step in pinned memory, int32 [rows, words], and a record of their contents.

    A row that already holds its value is neither written nor copied again, because most rows repeat from step to step:
    a request without a grammar has one row for all its tokens. Copy the rows from ``first_changed`` to ``changed_end``
    to the device, then call ``mark_clean``. Threads may write different rows concurrently.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self._contents: list[np.ndarray | None] = [None] * len(rows)  # the shared row that each row is a copy of
        self._written = bytearray(len(rows))  # 1 for a row that was written since `mark_clean`

    def write_shared(self, index: int, row: np.ndarray, count: int = 1) -> None:
        """Write ``row`` to the ``count`` rows from ``index`` on. The caller must not change ``row`` any more."""
        for at in range(index, index + count):
            if self._contents[at] is not row:
                self._write(at)[:] = row
                self._contents[at] = row

    def writable(self, index: int) -> np.ndarray:
        """Return row ``index`` as a view for the caller to write."""
        self._contents[index] = None
        return self._write(index)

    def count_allowed(self, index: int) -> int:
        """Return the number of tokens that row ``index`` allows."""
        return int.from_bytes(self._rows[index].tobytes(), "little").bit_count()

    @property
    def first_changed(self) -> int:
        """The index of the first row written since ``mark_clean``, or the number of rows if none was."""
        found = self._written.find(1)
        return len(self._written) if found < 0 else found

    @property
    def changed_end(self) -> int:
        """The index after the last row written since ``mark_clean``, or 0 if none was."""
        return self._written.rfind(1) + 1

    def mark_clean(self) -> None:
        """Record that all written rows were copied to the device."""
        self._written = bytearray(len(self._rows))

    def _write(self, index: int) -> np.ndarray:
        self._written[index] = 1
        row: np.ndarray = self._rows[index]
        return row

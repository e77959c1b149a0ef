"""The mask rows of rounds on their way to the device: what a row already holds is neither written nor sent again."""

import numpy as np

NOTHING = np.zeros(1, np.int32)  # spread over a row that allows no token


class MaskRows:
    """Mask rows, int32 [rows, words], and what is known to be in them.

    Most rows repeat from round to round: a request without a grammar has one row for all its tokens. ``changed_from``
    and ``changed`` bound the rows that were written since ``settle``, from the first to behind the last. Threads may
    write different rows at once.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self._rows = rows
        self._held: list[np.ndarray | None] = [None] * len(rows)  # what each row is a copy of
        self._written = bytearray(len(rows))  # 1 for a row that was written since `settle`

    def share(self, index: int, row: np.ndarray, count: int = 1) -> None:
        """Let the ``count`` rows from ``index`` on hold ``row``, which nobody changes any more."""
        for at in range(index, index + count):
            if self._held[at] is not row:
                self._write(at)[:] = row
                self._held[at] = row

    def own(self, index: int) -> np.ndarray:
        """Row ``index``, to be written."""
        self._held[index] = None
        return self._write(index)

    def allowed(self, index: int) -> int:
        """How many tokens row ``index`` allows."""
        return int.from_bytes(self._rows[index].tobytes(), "little").bit_count()

    @property
    def changed_from(self) -> int:
        """The first row that was written, or how many rows there are."""
        found = self._written.find(1)
        return len(self._written) if found < 0 else found

    @property
    def changed(self) -> int:
        """Behind the last row that was written."""
        return self._written.rfind(1) + 1

    def settle(self) -> None:
        """All changes have been taken note of."""
        self._written = bytearray(len(self._rows))

    def _write(self, index: int) -> np.ndarray:
        self._written[index] = 1
        row: np.ndarray = self._rows[index]
        return row

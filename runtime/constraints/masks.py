"""The mask rows of rounds on their way to the device: what a row already holds is neither written nor sent again."""

from threading import Lock

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
        self._changing = Lock()
        self.settle()

    def share(self, index: int, row: np.ndarray) -> None:
        """Let row ``index`` hold ``row``, which nobody changes any more."""
        if self._held[index] is not row:
            self._write(index)[:] = row
            self._held[index] = row

    def own(self, index: int) -> np.ndarray:
        """Row ``index``, to be written."""
        self._held[index] = None
        return self._write(index)

    def allowed(self, index: int) -> int:
        """How many tokens row ``index`` allows."""
        return int.from_bytes(self._rows[index].tobytes(), "little").bit_count()

    def settle(self) -> None:
        """All changes have been taken note of."""
        self.changed_from, self.changed = len(self._rows), 0

    def _write(self, index: int) -> np.ndarray:
        with self._changing:
            self.changed_from, self.changed = min(self.changed_from, index), max(self.changed, index + 1)
        row: np.ndarray = self._rows[index]
        return row

"""Which blocks of a paged cache belong to which row: host bookkeeping, no tensor."""

from tandemrt.engines.contract import blocks_of
from tandemrt.engines.errors import InternalError


class BlockAllocator:
    """Hands out the physical blocks 1 to ``blocks - 1``; a block belongs to one row at most.

    Block 0 is scratch: rows without a request write there, nobody reads it.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._free = list(range(blocks - 1, 0, -1))  # the lowest one is taken first
        self._rows: dict[int, list[int]] = {}

    def allocate(self, row: int, tokens: int) -> list[int] | None:
        """Let ``row`` hold ``tokens`` tokens in all; return its blocks, in order.

        None if there are too few free blocks: nothing has changed then. What the row holds already stays its own, so
        a smaller number of tokens changes nothing.
        """
        held = self._rows.get(row, [])
        missing = blocks_of(tokens) - len(held)
        if missing > len(self._free):
            return None
        held = held + [self._free.pop() for _ in range(missing)]
        self._rows[row] = held
        return list(held)

    def holds(self, row: int) -> bool:
        """Whether ``row`` was given blocks that it has not given back."""
        return row in self._rows

    def free(self, row: int) -> None:
        """Take back what ``row`` holds. Raises InternalError if it was given nothing."""
        if row not in self._rows:
            raise InternalError(f"blocks: row {row} holds none")
        self._free += reversed(self._rows.pop(row))

    @property
    def available(self) -> int:
        """Blocks that belong to no row."""
        return len(self._free)

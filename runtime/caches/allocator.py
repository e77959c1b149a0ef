"""Which blocks of a paged cache belong to which rows, and what they are known to hold: host bookkeeping, no tensor."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandemrt.engines.contract import blocks_of
from tandemrt.engines.errors import InternalError


@dataclass
class _Row:
    blocks: list[int] = field(default_factory=list)  # in the order of its text
    named: int = 0  # of those, the first ones whose content was told


class BlockAllocator:
    """Hands out the physical blocks 1 to ``blocks - 1``. Rows whose texts begin alike may share their first blocks.

    What a block holds is known by a hash once its row has told (``know``), and stays known when nobody holds the block
    any more, until somebody else takes it. Blocks whose content nobody knows are taken first, then the one that has
    been free for longest, the end of a text before its beginning.

    Block 0 is scratch: rows without a request write there, nobody reads it.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._empty = list(range(blocks - 1, 0, -1))  # free, of unknown content; the lowest one is taken first
        self._kept: OrderedDict[int, None] = OrderedDict()  # free, of known content, longest free first
        self._rows: dict[int, _Row] = {}
        self._holders = [0] * blocks  # rows that hold a block
        self._known: dict[bytes, int] = {}  # hash -> block
        self._hashes: dict[int, bytes] = {}  # block -> hash

    def allocate(self, row: int, tokens: int, hashes: Sequence[bytes] = ()) -> list[int] | None:
        """Let ``row`` hold ``tokens`` tokens in all; return the blocks that it got, behind those it has.

        None if there are too few free blocks: nothing has changed then. What the row holds already stays its own, so
        a smaller number of tokens changes nothing. The first blocks of a row that holds nothing are those known to
        hold what the leading ``hashes`` say (``found`` counts them); they must not exceed ``tokens``.
        """
        held = self._rows.get(row, _Row())
        shared = [] if held.blocks else [self._known[each] for each in hashes[: self.found(hashes)]]
        missing = blocks_of(tokens) - len(held.blocks) - len(shared)
        if missing > self.available - sum(not self._holders[block] for block in shared):
            return None
        for block in shared:
            self._kept.pop(block, None)
        got = shared + [self._take() for _ in range(missing)]
        for block in got:
            self._holders[block] += 1
        held.blocks += got
        held.named = max(held.named, len(shared))
        self._rows[row] = held
        return got

    def found(self, hashes: Sequence[bytes]) -> int:
        """How many of the leading ``hashes`` name blocks whose content is known."""
        return next((at for at, each in enumerate(hashes) if each not in self._known), len(hashes))

    def know(self, row: int, hashes: Sequence[bytes]) -> None:
        """Say what the first blocks of ``row`` hold. They must not be written again, and keep it when it leaves.

        Where another block is known to hold the same, that one stays the one to be found.
        """
        held = self._rows[row]
        for at in range(held.named, len(hashes)):
            block, name = held.blocks[at], hashes[at]
            if name not in self._known:
                self._known[name] = block
                self._hashes[block] = name
        held.named = max(held.named, len(hashes))

    def held(self, row: int) -> int:
        """How many blocks ``row`` was given and has not given back."""
        return len(self._rows[row].blocks) if row in self._rows else 0

    def free(self, row: int) -> None:
        """Take back what ``row`` holds. Raises InternalError if it was given nothing."""
        if row not in self._rows:
            raise InternalError(f"blocks: row {row} holds none")
        for block in reversed(self._rows.pop(row).blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._hashes:
                self._kept[block] = None
            else:
                self._empty.append(block)

    @property
    def available(self) -> int:
        """Blocks that belong to no row."""
        return len(self._empty) + len(self._kept)

    def _take(self) -> int:
        if self._empty:
            return self._empty.pop()
        block, _ = self._kept.popitem(last=False)
        del self._known[self._hashes.pop(block)]
        return block

"""Block allocation of a paged KV cache, with prefix caching. Host bookkeeping only, no tensors."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandemrt.engines.contract.contract import blocks_of
from tandemrt.engines.validation.errors import InternalError


@dataclass
class _Row:
    blocks: list[int] = field(default_factory=list)  # in the order of the text
    registered: int = 0  # number of leading blocks whose hashes are registered


class BlockAllocator:
    """Allocates the physical blocks 1 to ``blocks - 1`` to rows (slots). Rows with a common prefix share its blocks.

    ``register_prefix`` records the hashes of a row's blocks. A free block keeps its hash and can be found by it until
    it is allocated again (LRU). Allocation first takes free blocks without a hash, then the block that has been free
    for the longest time; the last blocks of a text are evicted before its first ones.

    Block 0 is scratch: free slots write there, and no request reads it.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._empty = list(range(blocks - 1, 0, -1))  # free blocks without a hash, taken from the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # free blocks with a hash, in LRU order
        self._rows: dict[int, _Row] = {}
        self._ref_counts = [0] * blocks  # number of rows that hold each block
        self._registered: dict[bytes, int] = {}  # hash -> block
        self._hashes: dict[int, bytes] = {}  # block -> hash

    def allocate(self, row: int, tokens: int, hashes: Sequence[bytes] = ()) -> list[int] | None:
        """Grow ``row`` to ``tokens`` tokens in total; return the new blocks, which follow its present ones.

        Returns None, and changes nothing, if too few blocks are free. A row never shrinks. A row without blocks first
        gets the cached blocks of the leading ``hashes`` (``count_cached``), which must not cover more than ``tokens``.
        """
        owned = self._rows.get(row, _Row())
        shared = [] if owned.blocks else [self._registered[each] for each in hashes[: self.count_cached(hashes)]]
        missing = blocks_of(tokens) - len(owned.blocks) - len(shared)
        if missing > self.available - sum(not self._ref_counts[block] for block in shared):
            return None
        for block in shared:
            self._cached.pop(block, None)
        got = shared + [self._take() for _ in range(missing)]
        for block in got:
            self._ref_counts[block] += 1
        owned.blocks += got
        owned.registered = max(owned.registered, len(shared))
        self._rows[row] = owned
        return got

    def count_cached(self, hashes: Sequence[bytes]) -> int:
        """Return how many of the leading ``hashes`` are registered."""
        return next((at for at, each in enumerate(hashes) if each not in self._registered), len(hashes))

    def register_prefix(self, row: int, hashes: Sequence[bytes]) -> None:
        """Register the hashes of the first blocks of ``row``, which must not be written afterwards.

        A hash that is already registered keeps its block.
        """
        owned = self._rows[row]
        for at in range(owned.registered, len(hashes)):
            block, name = owned.blocks[at], hashes[at]
            if name not in self._registered:
                self._registered[name] = block
                self._hashes[block] = name
        owned.registered = max(owned.registered, len(hashes))

    def num_blocks(self, row: int) -> int:
        """Return how many blocks ``row`` holds."""
        return len(self._rows[row].blocks) if row in self._rows else 0

    def free(self, row: int) -> None:
        """Free the blocks of ``row``. Raises InternalError if it holds none."""
        if row not in self._rows:
            raise InternalError(f"blocks: row {row} holds none")
        for block in reversed(self._rows.pop(row).blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block]:
                continue
            if block in self._hashes:
                self._cached[block] = None
            else:
                self._empty.append(block)

    @property
    def available(self) -> int:
        """The number of free blocks."""
        return len(self._empty) + len(self._cached)

    def _take(self) -> int:
        if self._empty:
            return self._empty.pop()
        block, _ = self._cached.popitem(last=False)
        del self._registered[self._hashes.pop(block)]
        return block

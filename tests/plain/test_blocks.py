"""Blocks of a paged cache: no two rows on one block, all blocks come back, and the scratch block is nobody's."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandemrt.engines.contract import BLOCK_SIZE
from tandemrt.engines.errors import InternalError
from tandemrt.runtime.caches.allocator import BlockAllocator

BLOCKS = 9


class BlocksModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS)
        self.held: dict[int, list[int]] = {}

    @rule(row=st.integers(0, 4), tokens=st.integers(1, 5 * BLOCK_SIZE))
    def allocate(self, row: int, tokens: int) -> None:
        needed = (tokens + BLOCK_SIZE - 1) // BLOCK_SIZE
        before = self.held.get(row, [])
        free = BLOCKS - 1 - sum(map(len, self.held.values()))
        blocks = self.allocator.allocate(row, tokens)
        if needed - len(before) > free:
            assert blocks is None
            return
        assert blocks is not None
        assert blocks[: len(before)] == before  # what a row has written stays where it is
        assert len(blocks) == max(needed, len(before))
        self.held[row] = blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        self.allocator.free(row)
        del self.held[row]

    @rule(row=st.integers(0, 4))
    def free_a_row_that_holds_nothing(self, row: int) -> None:
        if row not in self.held:
            with pytest.raises(InternalError, match=f"row {row} holds none"):
                self.allocator.free(row)

    @invariant()
    def every_block_has_one_owner_at_most(self) -> None:
        taken = [block for blocks in self.held.values() for block in blocks]
        assert len(set(taken)) == len(taken)
        assert set(taken) <= set(range(1, BLOCKS))
        assert self.allocator.available == BLOCKS - 1 - len(taken)

    def teardown(self) -> None:
        for row in list(self.held):
            self.allocator.free(row)
        assert self.allocator.allocate(0, (BLOCKS - 1) * BLOCK_SIZE) is not None


TestBlocks = BlocksModel.TestCase
TestBlocks.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)

"""KV cache blocks, compared with a naive model: sharing, ownership and registered prefixes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.allocator import BlockAllocator
from tandemrt.runtime.caches.kv_cache import BlockTable

BLOCKS = 9
TEXTS = ["aaaa", "aaab", "aabb", "b", "bb"]  # One letter is a block. The hash of a block is all text up to its end.


def hashes_of(text: str) -> list[bytes]:
    return [text[: end + 1].encode() for end in range(len(text))]


class BlocksModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS)
        self.held: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.known: dict[bytes, int] = {}
        self.freed: list[int] = []  # registered blocks that no row holds, longest free first

    @property
    def owned(self) -> Counter[int]:
        return Counter(block for blocks in self.held.values() for block in blocks)

    @property
    def free_blocks(self) -> set[int]:
        return set(range(1, BLOCKS)) - set(self.owned)

    @rule(row=st.integers(0, 4), text=st.sampled_from(TEXTS), tokens=st.integers(1, 5 * BLOCK_SIZE))
    def allocate(self, row: int, text: str, tokens: int) -> None:
        hashes = hashes_of(text)[: (tokens - 1) // BLOCK_SIZE]
        needed = -(-tokens // BLOCK_SIZE)
        before = self.held.get(row, [])
        shared: list[int] = []
        for each in () if before else hashes:
            if each not in self.known:
                break
            shared.append(self.known[each])
        free = self.free_blocks - set(shared)
        got = self.allocator.allocate(row, tokens, hashes)
        if needed - len(before) - len(shared) > len(free):
            assert got is None
            return
        assert got is not None
        fresh = got[len(shared) :]
        assert got[: len(shared)] == shared
        assert len(before) + len(got) == max(needed, len(before))
        assert set(fresh) <= free
        assert len(set(fresh)) == len(fresh)
        self.freed = [block for block in self.freed if block not in shared]
        lost = [block for block in fresh if block in self.freed]
        assert lost == self.freed[: len(lost)], "longest free first"
        assert not lost or set(fresh) >= free - set(self.freed), "unregistered blocks go first"
        self.freed = self.freed[len(lost) :]
        self.known = {name: block for name, block in self.known.items() if block not in lost}
        self.held[row] = before + got
        self.texts.setdefault(row, text)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def register_prefix(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        text = self.texts[row]
        count = data.draw(st.integers(0, min(len(text), len(self.held[row]))))
        self.allocator.register_prefix(row, hashes_of(text)[:count])
        for block, name in zip(self.held[row], hashes_of(text)[:count], strict=False):
            self.known.setdefault(name, block)

    @rule(text=st.sampled_from(TEXTS))
    def find(self, text: str) -> None:
        count = self.allocator.count_cached(hashes_of(text))
        assert all(name in self.known for name in hashes_of(text)[:count])
        assert count == len(text) or hashes_of(text)[count] not in self.known

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(sorted(self.held)))
        self.allocator.free(row)
        blocks = self.held.pop(row)
        del self.texts[row]
        named = set(self.known.values())
        self.freed += [block for block in reversed(blocks) if block in named and block in self.free_blocks]

    @rule(row=st.integers(0, 4))
    def free_a_row_that_holds_nothing(self, row: int) -> None:
        if row not in self.held:
            with pytest.raises(InternalError, match=f"row {row} holds none"):
                self.allocator.free(row)

    @invariant()
    def a_block_that_two_rows_hold_holds_one_text(self) -> None:
        assert set(self.owned) <= set(range(1, BLOCKS))
        assert self.allocator.available == len(self.free_blocks)
        for block, owners in self.owned.items():
            begun = {
                (self.held[row].index(block), self.texts[row][: self.held[row].index(block) + 1])
                for row in self.held
                if block in self.held[row]
            }
            assert owners == 1 or (len(begun) == 1 and block in self.known.values())
        assert all(self.allocator.num_blocks(row) == len(self.held.get(row, [])) for row in range(5))

    def teardown(self) -> None:
        for row in list(self.held):
            self.allocator.free(row)
        blocks = self.allocator.allocate(0, (BLOCKS - 1) * BLOCK_SIZE)
        assert sorted(blocks or []) == list(range(1, BLOCKS))


TestBlocks = BlocksModel.TestCase
TestBlocks.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_blocks_at_the_end_of_a_text_are_evicted_before_its_beginning() -> None:
    allocator = BlockAllocator(5)
    allocator.allocate(0, 4 * BLOCK_SIZE)
    allocator.register_prefix(0, hashes_of("abcd"))
    allocator.free(0)
    for kept in (3, 2, 1, 0):
        allocator.allocate(4 - kept, BLOCK_SIZE)
        assert allocator.count_cached(hashes_of("abcd")) == kept


@pytest.mark.parametrize(("more", "fits"), [(2, True), (3, True), (4, False)])
def test_free_cached_blocks_that_are_shared_are_not_also_free_for_others(more: int, fits: bool) -> None:
    """Of 5 free blocks, 2 are cached and become shared, so 3 are left."""
    allocator = BlockAllocator(6)
    allocator.allocate(0, 2 * BLOCK_SIZE)
    allocator.register_prefix(0, hashes_of("ab"))
    allocator.free(0)
    got = allocator.allocate(1, (2 + more) * BLOCK_SIZE, hashes_of("ab"))
    assert (got is not None) == fits
    assert allocator.available == (3 - more if fits else 5)
    assert allocator.count_cached(hashes_of("ab")) == 2


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), max_size=20))
def test_a_table_shows_all_changes_since_the_last_flush(changes: list[tuple[int, int, bool]]) -> None:
    """``changes``: slot, blocks that it then holds, 0 when it leaves, and whether a flush follows."""
    table, rows = BlockTable(4, 3, 20, torch.device("cpu")), [[0] * 3 for _ in range(4)]
    for slot, blocks, flushes in changes:
        if blocks:
            table.reserve(slot, blocks * BLOCK_SIZE)
            blocks = table.allocator.num_blocks(slot)
            rows[slot] = [*table.allocator._rows[slot].blocks, *[0] * (3 - blocks)]
        else:
            table.leave(slot)
            rows[slot] = [0] * 3
        if flushes:
            table.flush()
            assert table.device.tolist() == rows
    table.flush()
    assert table.device.tolist() == rows

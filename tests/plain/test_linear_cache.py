"""Linear KV caches: a row found by its hashes holds exactly the tokens that a fresh prefill would write."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import BLOCK_SIZE, Contract
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.linear import LinearCache, LinearCacheManager

SLOTS, BLOCKS, SLACK = 4, 3, 2


def hashes_of(text: str) -> list[bytes]:
    """Return the hashes of a text in which one letter is a block: all text up to the end of each block."""
    return [text[: end + 1].encode() for end in range(len(text))]


class Rows:
    """A manager over one cache tensor, in which the letters of a text are written as their codes."""

    def __init__(self) -> None:
        shape = ("batch", 1, BLOCKS * BLOCK_SIZE, 1)
        bindings = [Binding(f"{kind}_key.0", "float32", shape) for kind in ("past", "present")]
        contract = Contract((bindings[0],), (bindings[1],), (("present_key.0", "past_key.0"),))
        self.cache = LinearCache(contract, SLOTS, torch.device("cpu"))
        self.manager = LinearCacheManager(SLACK)
        self.manager.add(self.cache)

    def blocks(self, slot: int, count: int) -> list[set[float]]:
        row = self.cache.tensors["past_key.0"][slot, 0, :, 0].tolist()
        return [set(row[at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE]) for at in range(count)]

    def prefill(self, slot: int, text: str, start: int) -> None:
        for at, letter in list(enumerate(text))[start:]:
            self.cache.tensors["past_key.0"][slot, :, at * BLOCK_SIZE : (at + 1) * BLOCK_SIZE] = ord(letter)
        self.manager.register_prefix(slot, hashes_of(text))

    def leave(self, slot: int) -> None:
        """Free a slot. Rounds then overwrite its first positions."""
        self.manager.leave(slot)
        self.cache.tensors["past_key.0"][slot, :, : SLACK + 1] = -1


def test_a_row_that_is_not_prefilled_yet_is_no_source() -> None:
    """Two equal prompts join together: the second finds nothing until the first one is written."""
    rows = Rows()
    assert rows.manager.reserve(0, BLOCK_SIZE, hashes_of("ab")) == 0
    assert rows.manager.reserve(1, BLOCK_SIZE, hashes_of("ab")) == 0
    rows.prefill(0, "a", 0)
    assert rows.manager.reserve(2, BLOCK_SIZE, hashes_of("ab")) == BLOCK_SIZE
    assert rows.blocks(2, 1) == [{ord("a")}]
    assert rows.manager.reserve(3, BLOCK_SIZE, hashes_of("ab")) == BLOCK_SIZE


@pytest.mark.parametrize("target", [0, 1])
def test_the_saved_beginning_is_that_of_the_source(target: int) -> None:
    """The source row is free, so rounds have overwritten its first positions. Another free row saved other tokens."""
    rows = Rows()
    for slot, text in ((0, "xy"), (1, "ab")):
        rows.manager.reserve(slot, BLOCK_SIZE, hashes_of(text))
        rows.prefill(slot, text, 0)
        rows.leave(slot)
    assert rows.manager.reserve(target, BLOCK_SIZE, hashes_of("ab")) == 2 * BLOCK_SIZE
    assert rows.blocks(target, 2) == [{ord("a")}, {ord("b")}]


steps = st.tuples(st.integers(0, SLOTS - 1), st.sampled_from(["a", "ab", "abc", "abd", "b", "ba"]), st.booleans())


@given(steps=st.lists(steps, max_size=25))
def test_a_found_prefix_holds_its_tokens_after_any_joins_and_leaves(steps: list[tuple[int, str, bool]]) -> None:
    rows, texts = Rows(), dict[int, str]()
    for slot, text, prefilled in steps:
        if slot in texts:
            rows.leave(slot)
            del texts[slot]
            continue
        num_cached = rows.manager.reserve(slot, BLOCK_SIZE, hashes_of(text))
        assert num_cached is not None
        count = num_cached // BLOCK_SIZE
        assert rows.blocks(slot, count) == [{ord(letter)} for letter in text[:count]]
        texts[slot] = text
        if prefilled:
            rows.prefill(slot, text, count)


def test_usage_is_the_share_of_rows_that_slots_hold() -> None:
    rows = Rows()
    used = [rows.manager.usage]
    for slot in (0, 1):
        rows.manager.reserve(slot, BLOCK_SIZE)
        used.append(rows.manager.usage)
    rows.leave(0)
    rows.leave(0)
    assert [*used, rows.manager.usage] == [0, 1 / SLOTS, 2 / SLOTS, 1 / SLOTS]

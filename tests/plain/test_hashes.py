"""The hash of a block covers its tokens, all tokens before them, the bundle and the salt."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.contract.contract import BLOCK_SIZE
from tandemrt.runtime.caches.hashes import BlockHashes

FEW = 3 * BLOCK_SIZE
TEXT = st.lists(st.integers(0, 2**31), min_size=FEW, max_size=FEW + BLOCK_SIZE - 1)


@given(TEXT, st.integers(0, FEW - 1), st.integers(0, 2**31))
def test_a_token_changes_the_hash_of_its_block_and_all_following_blocks(text: list[int], at: int, token: int) -> None:
    other = [*text]
    other[at] = token
    first, second = (BlockHashes("bundle").first(each, 3) for each in (text, other))
    same = FEW // BLOCK_SIZE if text == other else at // BLOCK_SIZE
    assert [a == b for a, b in zip(first, second, strict=True)] == [block < same for block in range(3)]


@given(TEXT, st.lists(st.integers(0, 3), max_size=5))
def test_incremental_hashes_equal_those_of_the_whole_text(text: list[int], asked: list[int]) -> None:
    hashes = BlockHashes("bundle", "salt")
    whole = BlockHashes("bundle", "salt").first(text, 3)
    for blocks in asked:
        assert hashes.first(text[: blocks * BLOCK_SIZE], blocks) == whole[:blocks]


def test_other_bundles_salts_and_undrafted_requests_have_other_hashes() -> None:
    keys = [("one", None), ("two", None), ("one", "a"), ("one", "b"), ("one", "None"), ("one", "\ud800")]
    hashes = [BlockHashes(*key, undrafted=alone).first([7] * FEW, 3) for key in keys for alone in (False, True)]
    assert len({each for run in hashes for each in run}) == 2 * 3 * len(keys)


def test_blocks_of_equal_tokens_differ_by_the_tokens_before_them() -> None:
    assert all(a != b for a, b in pairwise(BlockHashes("bundle").first([7] * FEW, 3)))

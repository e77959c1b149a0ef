"""Mask rows: what is sent when rows change is what they hold, and what did not change is not sent."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.runtime.constraints import bitmask
from tandemrt.runtime.constraints.bitmask import FixedRow
from tandemrt.runtime.constraints.masks import NOTHING, MaskRows

ROWS, WORDS = 6, 3
SHARED = [NOTHING, *(np.full(WORDS, value, np.int32) for value in (-1, 5))]
WRITE = st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS), st.one_of(st.integers(0, 2), st.integers(10, 20)))


@given(st.lists(st.lists(WRITE, max_size=8), max_size=6))
def test_what_is_sent_makes_the_copy_equal(rounds: list[list[tuple[int, int, int]]]) -> None:
    rows = np.zeros((ROWS, WORDS), np.int32)
    masks, copy, expected = MaskRows(rows), rows.copy(), rows.copy()
    for writes in rounds:
        for index, count, what in writes:
            if what < len(SHARED):
                count = min(count, ROWS - index)
                masks.share(index, SHARED[what], count)
                expected[index : index + count] = SHARED[what]
            else:
                masks.own(index)[:] = what
                expected[index] = what
        copy[masks.changed_from : masks.changed] = rows[masks.changed_from : masks.changed]
        masks.settle()
        assert (copy == expected).all()
        assert (rows == expected).all()


def test_a_row_that_holds_it_already_is_not_written_again() -> None:
    masks = MaskRows(np.zeros((ROWS, WORDS), np.int32))
    masks.share(2, SHARED[1])
    masks.settle()
    masks.share(2, SHARED[1])
    assert masks.changed <= masks.changed_from
    masks.share(2, SHARED[2])
    masks.share(4, SHARED[1])
    assert (masks.changed_from, masks.changed) == (2, 5)


@given(st.sets(st.integers(0, 32 * WORDS - 1), max_size=4), st.integers(-40, 40 * WORDS))
def test_a_row_that_nobody_changes_says_what_one_says_that_is_looked_through(tokens: set[int], other: int) -> None:
    row = np.zeros(WORDS, np.int32)
    for token in tokens:
        bitmask.allow(row, token)
    fixed = FixedRow(row)
    for token in (*tokens, other):
        assert fixed.allows(token) == bitmask.allows(row, token) == (token in tokens)
    assert fixed.only == bitmask.only(row)
    assert fixed.empty == (not tokens)
    for token in tokens:
        bitmask.forbid(row, token)
    assert not row.any()

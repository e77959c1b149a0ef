"""Mask rows: uploads copy exactly the changed rows."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.rows import NO_TOKENS, MaskRows
from tandemrt.runtime.grammars import bitmask
from tandemrt.runtime.grammars.bitmask import FixedRow

ROWS, WORDS = 6, 3
SHARED = [NO_TOKENS, *(np.full(WORDS, value, np.int32) for value in (-1, 5))]
ONLY, WITHOUT = range(100, 196), range(200, 296)  # a token each
KINDS = st.one_of(st.integers(0, 2), st.integers(10, 20), st.sampled_from(ONLY), st.sampled_from(WITHOUT))
WRITE = st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS), KINDS)


@given(st.lists(st.lists(WRITE, max_size=8), max_size=6))
def test_uploads_make_the_device_copy_equal(rounds: list[list[tuple[int, int, int]]]) -> None:
    rows = np.zeros((ROWS, WORDS), np.int32)
    masks, copy, expected = MaskRows(rows), rows.copy(), rows.copy()
    for writes in rounds:
        for index, count, what in writes:
            if what < len(SHARED):
                count = min(count, ROWS - index)
                masks.write_shared(index, SHARED[what], count)
                expected[index : index + count] = SHARED[what]
            elif what in ONLY:
                masks.allow_only(index, what - ONLY.start)
                bitmask.allow_only(expected[index], what - ONLY.start)
            elif what in WITHOUT:
                masks.write_without(index, SHARED[1 + count % 2], what - WITHOUT.start)
                expected[index] = SHARED[1 + count % 2]
                bitmask.forbid(expected[index], what - WITHOUT.start)
            else:
                masks.writable(index)[:] = what
                expected[index] = what
        copy[masks.first_changed : masks.changed_end] = rows[masks.first_changed : masks.changed_end]
        masks.mark_clean()
        assert (copy == expected).all()
        assert (rows == expected).all()
        shared_ids = np.array([id(SHARED[1])] * ROWS)
        assert set(range(ROWS)) - set(masks.others_than(shared_ids, 1)) <= {
            *np.flatnonzero((rows == SHARED[1]).all(axis=1))
        }


def test_an_unchanged_row_is_not_written_again() -> None:
    masks = MaskRows(np.zeros((ROWS, WORDS), np.int32))
    masks.write_shared(2, SHARED[1])
    masks.mark_clean()
    masks.write_shared(2, SHARED[1])
    assert masks.changed_end <= masks.first_changed
    masks.write_shared(2, SHARED[2])
    masks.write_shared(4, SHARED[1])
    assert (masks.first_changed, masks.changed_end) == (2, 5)


@given(st.sets(st.integers(0, 32 * WORDS - 1), max_size=4), st.integers(-40, 40 * WORDS))
def test_a_cached_shared_row_equals_a_scanned_one(tokens: set[int], other: int) -> None:
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


def test_the_rows_of_a_slot_stay_when_a_request_with_the_same_stop_tokens_joins_it() -> None:
    masks = MaskRows(np.zeros((ROWS, WORDS), np.int32))
    changed = []
    for stops, banned in (([7], ()), ([7], ()), ([8], ()), ([8], [4])):
        Constraint(32 * WORDS, stops, banned=banned, min_tokens=9).fill_rows([1, 2], masks, 0)
        changed.append(masks.changed_end)
        masks.mark_clean()
    assert changed == [3, 0, 3, 3]

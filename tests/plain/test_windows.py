"""The shape of a round: its batch bucket and its draft window."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.contract.calls import Shape, bucket, buckets, rounds
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner


def test_buckets_waste_at_most_a_third_from_eight_rows_on() -> None:
    assert buckets(100) == [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100]
    assert all(bucket(rows, 1000) < 1.5 * rows for rows in range(8, 1000))


@given(st.integers(1, 300), st.integers(0, 300))
def test_a_bucket_fits_its_rows_and_is_at_most_the_number_of_slots(rows: int, more: int) -> None:
    assert rows <= bucket(rows, rows + more) <= rows + more
    assert bucket(rows, rows + more) in buckets(rows + more)


def test_few_requests_in_high_slots_get_a_large_batch_and_their_own_draft_window() -> None:
    assert rounds(4, DraftWindowPlanner({1: 8, 3: 2}, 8).usual) == [Shape(1, 8), Shape(2, 8), Shape(4, 2), Shape(4, 8)]
    assert rounds(100, DraftWindowPlanner(None, 5).usual) == [Shape(batch, 5) for batch in buckets(100)]


@given(st.dictionaries(st.integers(2, 70), st.integers(0, 8)), st.integers(0, 8), st.integers(1, 80))
def test_an_entry_of_a_window_table_applies_up_to_the_next(table: dict[int, int], first: int, live: int) -> None:
    table = {1: first, **table}
    assert DraftWindowPlanner(table, 8).limit(live) == table[max(least for least in table if least <= live)]
    assert DraftWindowPlanner(table, 8).largest == max(table.values())


def test_the_default_draft_window_comes_from_the_bundle() -> None:
    assert [DraftWindowPlanner(windows, 5).limit(3) for windows in (None, 0, 4)] == [5, 0, 4]


@pytest.mark.parametrize("windows", [6, -1, True, 2.0, {}, {2: 1}, {0: 1, 1: 1}, {1: 6}, {1: -1}, {1: 2, "2": 1}])
def test_invalid_windows_are_rejected(windows: Any) -> None:
    with pytest.raises(BadRequest, match=r"num_draft_tokens: .* received"):
        DraftWindowPlanner(windows, 5)

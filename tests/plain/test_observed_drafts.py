"""What a lookup learns of a request's drafts: how many the request drafts itself, not how many others do."""

from types import SimpleNamespace

import pytest

from tandemrt.runtime.caches.linear import LinearCacheManager
from tandemrt.runtime.requests.running import RunningRequest
from tandemrt.runtime.requests.slots import Slots
from tests.plain.requests import ids
from tests.plain.test_request_ends import WINDOW, committed, join_slot


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_lookup_learns_of_the_drafts_that_a_request_allows_beside_others(rule: str) -> None:
    """Under the rejection rule it decides by them what is drafted, and so the text."""
    slots = Slots(2, LinearCacheManager(0), [], num_draft_tokens=WINDOW)
    few, _ = join_slot(slots, window=1, rule=rule)
    many, _ = join_slot(slots, window=WINDOW, rule=rule)
    observed: list[tuple[RunningRequest, int, int]] = []
    committer, commit = committed({0: ids("a"), 1: ids("b")}, slots)
    committer._lookup = SimpleNamespace(observe=lambda *each: observed.append(each))  # type: ignore[assignment]
    for _ in range(2):  # one by one, then rows that only lengthen their texts
        commit()
        assert observed == [(few, 0, 1), (many, 0, WINDOW)]
        observed.clear()

"""A cache of the values that were used last, within its bytes."""

from tandemrt.runtime.requests.recent import Recent


def test_a_value_that_replaces_another_counts_once_and_becomes_the_newest() -> None:
    recent: Recent[str] = Recent(4)
    recent.put("a", "old", 2)
    recent.put("b", "b", 1)
    recent.put("a", "new", 3)
    assert (recent.get("b"), recent.get("a")) == ("b", "new"), "3 and 1 bytes"
    recent.put("b", "b", 1)
    recent.put("c", "c", 1)
    assert [recent.get(key) for key in "abc"] == [None, "b", "c"]


def test_dropped_values_free_their_bytes() -> None:
    recent: Recent[int] = Recent(4)
    for number in range(9):
        recent.put(number, number, 2)
    assert [recent.get(number) for number in range(9)] == [None] * 7 + [7, 8]
    recent.put(9, 9, 5)
    assert [recent.get(number) for number in (7, 8, 9)] == [None, None, 9], "the newest value stays, of any size"

"""Markers are found token by token, wherever they overlap, and a prompt is read to the phase it ends in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.errors import BadRequest
from tandemrt.runtime.constraints.markers import ROOT, Closing, MarkerMatcher
from tandemrt.runtime.constraints.thinking import ThinkingRule, read_prompt
from tests.plain.constraints import VOCABULARY

ids = st.integers(0, 2)
marker = st.lists(ids, min_size=1, max_size=4).map(tuple)


@given(start=marker, implicit=st.dictionaries(marker, st.booleans(), min_size=1, max_size=3), text=st.lists(ids))
def test_the_matcher_agrees_with_looking_at_the_whole_text_after_every_token(start, implicit, text):
    """G12: self-overlapping markers included (three token ids make them common)."""
    ends = list(implicit)
    matcher = MarkerMatcher(VOCABULARY, start, [Closing(end, implicit[end]) for end in ends])
    node = ROOT
    for length, token in enumerate(text, 1):
        node = matcher.nodes[node].next.get(token, ROOT)
        seen = tuple(text[:length])
        here = matcher.nodes[node]
        complete = [end for end in ends if seen[-len(end) :] == end]
        assert here.opens == (seen[-len(start) :] == start)
        assert (here.closes.symbols if here.closes else ()) == max(complete, key=len, default=())
        assert here.ends == any(not implicit[end] for end in complete)
        assert here.open_prefix == longest_unfinished(seen, [start])
        assert here.close_prefix == longest_unfinished(seen, ends)


def longest_unfinished(seen, markers):
    sizes = [size for m in markers for size in range(1, len(m)) if seen[-size:] == m[:size]]
    return max(sizes, default=0)


RULE = ThinkingRule(start=(1,), ends=[(2,), (5, 6)], forced_end=(9, 2), implicit_ends=[(7,)], vocabulary=VOCABULARY)


@pytest.mark.parametrize(
    ("prompt", "block_open", "spent"),
    [
        ((), None, 0),
        ((3, 4), None, 0),
        ((1,), True, 0),
        ((1, 3, 3, 3), True, 3),
        ((1, 3, 2), False, 0),
        ((2,), False, 0),
        ((1, 3, 2, 1, 3), True, 1),
        ((1, 3, 1, 3, 3), True, 2),
        ((1, 3, 5, 6, 4), False, 0),
        ((1, 3, 5), True, 2),
        ((1, 3, 7, 4), False, 0),
        ((7, 4), None, 0),
        ((7, 1, 4), True, 1),
    ],
)
def test_the_last_marker_of_a_prompt_decides(prompt, block_open, spent):
    reading = read_prompt(RULE, prompt)
    assert (reading.block_open, reading.spent) == (block_open, spent)


def test_an_end_marker_that_an_implicit_one_ends_with_counts_outside_of_a_block_too():
    rule = ThinkingRule(start=(1, 1), ends=[(1,)], forced_end=(1,), implicit_ends=[(2, 1)], vocabulary=VOCABULARY)
    assert read_prompt(rule, (2, 1, 1)).block_open is False  # the first 1 ends, so the second begins no start marker


@pytest.mark.parametrize("budget", [-2, 1.5, 2.0, True, "3", [1]])
def test_a_budget_that_is_no_token_count_is_refused(budget):
    with pytest.raises(BadRequest, match="budget: must be an integer"):
        ThinkingRule((1,), [(2,)], (2,), budget=budget, vocabulary=VOCABULARY)


@pytest.mark.parametrize("budget", [None, -1])
def test_none_and_minus_one_set_no_budget(budget):
    assert ThinkingRule((1,), [(2,)], (2,), budget=budget, vocabulary=VOCABULARY).budget is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": ()}, "start: a marker is a non-empty"),
        ({"start": 1}, "start: a marker is a sequence"),
        ({"start": (-1,)}, "start: a marker is a non-empty"),
        ({"ends": []}, "ends: at least one"),
        ({"ends": [()]}, r"ends\[0\]: a marker is a non-empty"),
        ({"ends": (2, 3)}, r"ends\[0\]: a marker is a sequence"),
        ({"implicit_ends": [(2,)]}, r"implicit_ends: \[2\] is also one of ends"),
        ({"forced_end": (8, 9)}, "forced_end: must contain one of ends"),
        ({"forced_end": ()}, "forced_end: a marker is a non-empty"),
        ({"ends": [(2, 3)], "forced_end": (2, 9, 3)}, "forced_end: must contain one of ends"),
    ],
)
def test_a_rule_that_could_not_work_is_refused_by_name(change, message):
    good = {"start": (1,), "ends": [(2,)], "forced_end": (2,), "implicit_ends": ()}
    with pytest.raises(BadRequest, match=message):
        ThinkingRule(**(good | change), vocabulary=VOCABULARY)


def test_the_marker_of_a_forced_end_may_stand_anywhere():
    for forced_end, place in [((2, 8), range(1)), ((8, 2, 9), range(1, 2)), ((8, 9, 2), range(2, 3))]:
        assert ThinkingRule((1,), [(2,)], forced_end, vocabulary=VOCABULARY).forced_marker == place

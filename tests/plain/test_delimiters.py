"""Token-level matching of reasoning delimiters, and the phase at the end of a prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.constraints.delimiters import ROOT, DelimiterMatcher, EndDelimiter, last_tokens_covering
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tests.plain.constraints import VOCABULARY

ids = st.integers(0, 2)
delimiter = st.lists(ids, min_size=1, max_size=4).map(tuple)


@given(start=delimiter, implicit=st.dictionaries(delimiter, st.booleans(), min_size=1, max_size=3), text=st.lists(ids))
def test_the_matcher_agrees_with_a_search_of_the_whole_text(start, implicit, text):
    """Three token ids make self-overlapping delimiters common."""
    ends = list(implicit)
    matcher = DelimiterMatcher(VOCABULARY, start, [EndDelimiter(end, implicit[end]) for end in ends])
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


def longest_unfinished(seen, delimiters):
    sizes = [size for m in delimiters for size in range(1, len(m)) if seen[-size:] == m[:size]]
    return max(sizes, default=0)


@pytest.mark.parametrize(
    ("size", "covering"), [(0, ()), (1, (5,)), (5, (5,)), (6, (2, 5)), (7, (2, 5)), (8, (3, 2, 5)), (99, (3, 2, 5))]
)
def test_the_last_tokens_that_cover_a_number_of_symbols_are_the_fewest(size: int, covering: tuple[int, ...]) -> None:
    assert last_tokens_covering((3, 2, 5), size) == covering


RULE = ThinkingRule(
    think_start=(1,), think_ends=[(2,), (5, 6)], forced_end=(9, 2), implicit_ends=[(7,)], vocabulary=VOCABULARY
)


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
def test_the_last_delimiter_of_a_prompt_decides(prompt, block_open, spent):
    reading = RULE.matcher.read(prompt)
    assert (reading.block_open, reading.spent) == (block_open, spent)


def test_an_end_delimiter_inside_an_implicit_end_counts_outside_a_block():
    rule = ThinkingRule(
        think_start=(1, 1), think_ends=[(1,)], forced_end=(1,), implicit_ends=[(2, 1)], vocabulary=VOCABULARY
    )
    # The first 1 is an end, so the second begins no start delimiter.
    assert rule.matcher.read((2, 1, 1)).block_open is False


@pytest.mark.parametrize("budget", [-2, 1.5, 2.0, True, "3", [1]])
def test_a_budget_that_is_no_token_count_is_rejected(budget):
    with pytest.raises(BadRequest, match="budget: must be an integer"):
        ThinkingRule((1,), [(2,)], (2,), budget=budget, vocabulary=VOCABULARY)


@pytest.mark.parametrize("budget", [None, -1])
def test_none_and_minus_one_set_no_budget(budget):
    assert ThinkingRule((1,), [(2,)], (2,), budget=budget, vocabulary=VOCABULARY).budget is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"think_start": ()}, "think_start: must be a non-empty"),
        ({"think_start": 1}, "think_start: must be a sequence"),
        ({"think_start": (-1,)}, "think_start: must be a non-empty"),
        ({"think_ends": []}, "think_ends: must hold at least one"),
        ({"think_ends": [()]}, r"think_ends\[0\]: must be a non-empty"),
        ({"think_ends": (2, 3)}, r"think_ends\[0\]: must be a sequence"),
        ({"implicit_ends": [(2,)]}, r"implicit_ends: \[2\] is also one of think_ends"),
        ({"forced_end": (8, 9)}, "forced_end: must contain one of think_ends"),
        ({"forced_end": ()}, "forced_end: must be a non-empty"),
        ({"think_ends": [(2, 3)], "forced_end": (2, 9, 3)}, "forced_end: must contain one of think_ends"),
    ],
)
def test_a_contradictory_rule_is_rejected_with_the_name_of_its_field(change, message):
    good = {"think_start": (1,), "think_ends": [(2,)], "forced_end": (2,), "implicit_ends": ()}
    with pytest.raises(BadRequest, match=message):
        ThinkingRule(**(good | change), vocabulary=VOCABULARY)


def test_the_delimiter_of_a_forced_end_may_be_anywhere_in_it():
    for forced_end, place in [((2, 8), range(1)), ((8, 2, 9), range(1, 2)), ((8, 9, 2), range(2, 3))]:
        assert ThinkingRule((1,), [(2,)], forced_end, vocabulary=VOCABULARY).forced_delimiter == place

"""Copies are what a search through the whole text would copy, as far as earlier ones were right."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.plugins.operators.constants import Rule
from tandemrt.runtime.drafters.copy_source import CopySource
from tandemrt.runtime.drafters.text_lookup import TextLookup, _Outlook
from tandemrt.runtime.requests.round import Round
from tests.plain.requests import make_running


@dataclass
class Reader:
    """What CopySource follows, by its description, with a search that goes through the whole text."""

    shortest: int
    longest: int
    text: list[int] = field(default_factory=list)
    position: int | None = None  # of the predicted token
    matched: int = 0  # tokens before it
    left: int | None = None  # where the text left a long match
    committed: int | None = None  # tokens that a match may end within; None: all

    def read(self, token: int) -> None:
        predicted = self.position
        self.text.append(token)
        if predicted is not None and self.text[predicted] == token:
            self.position, self.matched = predicted + 1, self.matched + 1
            return
        if predicted is not None and self.matched >= 8:
            self.left = predicted
        near = [] if self.left is None else range(self.left, min(self.left + 8, len(self.text) - 1))
        if returned := [place + 1 for place in near if self.text[place] == token]:
            self.position, self.matched = returned[0], 8
        elif self.search() is None and predicted is not None:
            self.position, self.matched = predicted + 1, 0
        else:
            self.position = self.search()

    def search(self) -> int | None:
        """The end of the longest match of the 16 latest ones; of equals the latest. Sets ``matched``."""
        text = self.text
        newest = text[-self.shortest :]
        last = len(text) - 1 if self.committed is None else self.committed
        ends = [end for end in range(last, 0, -1) if text[max(0, end - self.shortest) : end] == newest]
        lengths = {end: self.length(end) for end in ends[:16]} if len(newest) == self.shortest else {}
        best = max(lengths, key=lambda end: (lengths[end], end), default=None)
        self.matched = 0 if best is None else lengths[best]
        return best

    def length(self, end: int) -> int:
        most = min(self.longest, end)
        return next((size for size in range(most) if self.text[end - size - 1] != self.text[-size - 1]), most)


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8),
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.integers(0, 2), max_size=3),
)
def test_copies_of_a_growing_text_follow_a_search(
    parts: list[list[int]], shortest: int, more: int, following: list[int]
) -> None:
    source, reader = CopySource(shortest, shortest + more), Reader(shortest, shortest + more)
    for number, part in enumerate(parts):
        for token in part:
            if number:
                reader.read(token)
            else:
                reader.text.append(token)
        if not number:
            reader.position = reader.search()
        source.read(reader.text, len(parts[0]))
        after = replace(reader, text=list(reader.text), committed=len(reader.text))
        for token in following:
            after.read(token)
        for drafted, copy in ((reader, source.copy(5)), (after, source.copy(5, following))):
            followed = [] if drafted.position is None else drafted.text[drafted.position :]
            assert copy.tokens == [followed[at % len(followed)] for at in range(len(copy.tokens))]
            assert 0 <= copy.expected <= len(copy.tokens)
            assert bool(copy.tokens) or drafted.position is None or number, "a first match is copied"


def copied_after(prompt: list[int], output: list[int], most: int = 8) -> list[int]:
    source = CopySource(2, 32)
    source.read(prompt + output, len(prompt))
    return source.copy(most).tokens


def test_copies_continue_a_periodic_text_beyond_its_end() -> None:
    assert copied_after([1, 2, 3, 1, 2, 3], [1, 2, 3] * 4, most=7) == [1, 2, 3, 1, 2, 3, 1]


def test_copies_grow_with_hits_and_end_with_misses() -> None:
    prompt = list(range(100, 160))
    lengths = [len(copied_after([*prompt, 1], prompt[:count])) for count in (2, 10, 40)]
    assert lengths == sorted(lengths)
    assert lengths[0] < lengths[2] == 8
    wrong = [token for at in range(0, 40, 2) for token in (*prompt[at : at + 2], 7)]  # each match is one token long
    assert copied_after([*prompt, 1], wrong + prompt[:2]) == []


def test_copies_resume_after_a_replaced_token() -> None:
    prompt = list(range(100, 160))
    assert copied_after([*prompt, 1], [*prompt[:20], 7])[:2] == prompt[21:23]


def test_copies_return_to_the_place_that_an_edit_left() -> None:
    """Two tokens became one, and elsewhere something else followed that."""
    prompt = list(range(100, 160))
    elsewhere = [*prompt[18:20], prompt[21], 7, 8]
    assert copied_after([*prompt, *elsewhere, 1], [*prompt[:20], prompt[21]])[:2] == prompt[22:24]


@pytest.mark.parametrize("sizes", [[1] * 5, [2, 3], [5]])
def test_copies_do_not_depend_on_how_the_text_is_read(sizes: list[int]) -> None:
    text, source = [1, 2, 3, 4, 1, 2, 3, 4, 1], CopySource(2, 4)
    read = 4
    for size in sizes:
        read += size
        source.read(text[:read], 4)
    whole = CopySource(2, 4)
    whole.read(text, 4)
    assert source.copy(4) == whole.copy(4)


def looked_up(lookup: TextLookup, **fields: object) -> dict[int, list[int]]:
    running = make_running(prompt=[1, 2, 3, 1, 5, 6, 1, 2])
    lookup.join(running)
    round_ = Round({0: running}, 1, 4, needs_probs=False, rules=frozenset(), **fields)  # type: ignore[arg-type]
    return lookup.copies(round_, proposed=False)


def test_copies_continue_after_fast_forward_tokens() -> None:
    assert looked_up(TextLookup(1, 2), fast_forward={0: [5]}) == {0: [5, 6, 1]}


def test_a_drafter_drafts_where_its_drafts_are_accepted_more_often() -> None:
    lookup, running = TextLookup(1, 2, with_drafter=True), make_running(prompt=[1, 2, 3, 1])
    lookup.join(running)
    round_ = Round({0: running}, 1, 4, needs_probs=False, rules=frozenset(), num_proposed=4)
    for rounds, accepted, copying in ((5, 4, False), (20, 0, True)):
        for _ in range(rounds):
            lookup.observe(running, accepted, 4)
        assert bool(lookup.copies(round_, proposed=False)) == copying


@pytest.mark.parametrize(
    ("copying", "rules", "longest"),
    [(1, [], 0), (4, [], 16), (1, [Rule.REJECTION], 16), (1, [Rule.COUPLED, Rule.REJECTION], 16)],
)
def test_long_copies_of_few_rows_do_not_widen_all_rows_of_a_round(
    copying: int, rules: list[Rule], longest: int
) -> None:
    """But a text under the rejection rule depends on its drafts, so these do not depend on other rows."""
    lookup = TextLookup(1, 32, cost=lambda round_, window: 1 + 0.2 * round_.batch * (window + 1))
    rows = {
        slot: make_running(prompt=[1, 2, 3, 4] * 20 if slot < copying else [slot], slot=slot, window=16, max_tokens=99)
        for slot in range(4)
    }
    for running in rows.values():
        lookup.join(running)
    copies = lookup.copies(Round(rows, 4, 16, needs_probs=False, rules=frozenset(rules)), proposed=False)
    assert max(map(len, copies.values()), default=0) == longest


def model_round(
    chances_of_copies: int, *, proposed: bool, step_cost: float, rules: Sequence[Rule] = (Rule.COUPLED,)
) -> dict[int, list[int]]:
    """Two rows, whose drafter gets all of 4 tokens accepted; the first ones copy ``chances_of_copies`` * 16 tokens."""
    lookup = TextLookup(
        1,
        32,
        with_drafter=True,
        cost=lambda round_, window: 1 + 0.1 * round_.batch * window,
        draft_cost=lambda _, tokens: step_cost * tokens,
    )
    rows = {
        slot: make_running(prompt=[1, 2, 3, 4] * 20 if slot < chances_of_copies else [slot], slot=slot, window=16)
        for slot in range(2)
    }
    for running in rows.values():
        lookup.join(running)
        for _ in range(20):
            lookup.observe(running, 4, 4)
    round_ = Round(rows, 2, 16, needs_probs=False, rules=frozenset(rules), num_proposed=4)
    return lookup.copies(round_, proposed=proposed)


def test_a_round_does_without_a_slow_drafter_where_copies_promise_more_tokens_per_time() -> None:
    copies = model_round(1, proposed=False, step_cost=0.5)
    assert len(copies[0]) > 4
    assert copies[1] == [], "a row without a copy drafts nothing"
    assert 1 not in model_round(1, proposed=False, step_cost=0.01)
    assert 1 not in model_round(1, proposed=True, step_cost=0.5), "the drafter has run"
    assert model_round(0, proposed=False, step_cost=0.5) == {}


def test_beside_a_request_under_the_rejection_rule_no_row_goes_without_its_drafter() -> None:
    """A text under that rule depends on its drafts, so copies of others do not decide which these are."""
    for rules in ([Rule.REJECTION], [Rule.COUPLED, Rule.REJECTION]):
        copies = model_round(1, proposed=False, step_cost=0.5, rules=rules)
        assert [*copies] == [0]


def test_a_request_copies_by_the_acceptance_of_its_own_drafts() -> None:
    """Whatever others accept, and have accepted before it began."""
    for accepted, own in ((0, 4), (4, 0), (0, None), (4, None)):
        lookup = TextLookup(1, 32, with_drafter=True)
        rows = {slot: make_running(prompt=[1, 2, 3, 4] * 9, slot=slot, rule="rejection") for slot in range(2)}
        for running, count in ((rows[0], accepted), (rows[1], own)):
            lookup.join(running)
            if count is not None:
                for _ in range(20):
                    lookup.observe(running, count, 4)
        for slots in ([1], [0, 1]):
            asked = {slot: rows[slot] for slot in slots}
            round_ = Round(asked, 2, 4, needs_probs=False, rules=frozenset({Rule.REJECTION}), num_proposed=4)
            assert (1 in lookup.copies(round_, proposed=False)) == (own != 4)


@pytest.mark.parametrize(
    ("wait", "window_cost", "accepted", "worth"),
    [(0.1, 1.0, 0, True), (20.0, 1.0, 0, False), (0.1, 9.0, 0, False), (0.1, 1.0, 4, False)],
)
def test_the_target_waits_only_for_copies_that_promise_more_than_the_wait(
    wait: float, window_cost: float, accepted: int, worth: bool
) -> None:
    """Or more than a wider window costs, or than the drafter's tokens promise."""
    lookup = TextLookup(1, 32, with_drafter=True, cost=lambda _, window: window_cost if window == 4 else 1.0)
    running = make_running(prompt=[1, 2, 3, 4] * 20)
    lookup.join(running)
    for _ in range(40):
        lookup.observe(running, accepted, 4)
    rules, num_proposed = frozenset({Rule.COUPLED}), 4 if window_cost == 1.0 else 0
    round_ = Round({0: running}, 1, 4, needs_probs=False, rules=rules, num_proposed=num_proposed)
    assert lookup.promises(round_, wait) == worth


@pytest.mark.parametrize(("rejection", "copies"), [(True, True), (False, False)])
def test_requests_under_the_rejection_rule_copy_only_if_their_texts_may_depend_on_it(
    rejection: bool, copies: bool
) -> None:
    lookup = TextLookup(1, 32, rejection=rejection)
    running = make_running(prompt=[1, 2, 3, 4] * 20, rule="rejection")
    lookup.join(running)
    for rules in ([Rule.REJECTION], [Rule.COUPLED, Rule.REJECTION]):
        round_ = Round({0: running}, 1, 4, needs_probs=False, rules=frozenset(rules))
        assert bool(lookup.copies(round_, proposed=False)) == lookup.promises(round_, wait=100.0) == copies


def test_copies_that_promise_as_much_as_the_drafter_are_taken() -> None:
    outlook = _Outlook(fast_forward=(1,), copied=(2, 3), chance=0.5, proposed=1.0)
    assert outlook.copies
    assert not outlook._replace(proposed=1.01).copies
    assert not outlook._replace(copied=(), proposed=0.0).copies
    assert (outlook.window(2), outlook.expected(2), outlook.expected(1)) == ([1, 2], 0.5, 0.0)

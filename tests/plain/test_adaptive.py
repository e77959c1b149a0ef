"""The window follows what is accepted, and what a drafted token costs."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt.runtime.round.adaptive import HOPE, Acceptance, best_window
from tandemrt.runtime.round.costs import GUESS, RoundCosts
from tandemrt.runtime.round.windows import Windows
from tests.plain.requests import make_running

WINDOWS = [0, 1, 2, 4, 8]


def linear(token: float) -> dict[int, float]:
    """Costs of rounds in which every drafted token costs the same."""
    return {window: 1 + token * window for window in WINDOWS}


def known(*noted: tuple[int, int]) -> Acceptance:
    acceptance = Acceptance()
    for accepted, asked in noted:
        acceptance.note(accepted, asked)
    return acceptance


def after(*noted: tuple[int, int]) -> float:
    return known(*noted).rate


class Even(Acceptance):
    """Every drafted token has the same chance."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self._chance = chance

    def emitted(self, window: int) -> float:
        return sum(self._chance**accepted for accepted in range(window + 1))


@given(st.lists(st.integers(0, 8).flatmap(lambda asked: st.tuples(st.integers(0, asked), st.just(asked)))))
def test_a_rate_is_a_chance(noted: list[tuple[int, int]]) -> None:
    assert 0 < after(*noted) < 1


def test_the_rate_is_that_of_the_last_windows() -> None:
    assert after(*[(4, 4)] * 30) > 0.98
    assert after(*[(0, 4)] * 30) < 0.05
    assert after(*[(4, 4)] * 30, *[(0, 4)] * 60) < 0.1
    assert after(*[(1, 4)] * 100) == pytest.approx(0.5, abs=0.02)  # every second one is refused


def test_what_was_useless_is_tried_again_after_a_while_and_not_at_once() -> None:
    forgotten = [known(*[(0, 4)] * 9, *[(0, 0)] * plain) for plain in range(300)]
    rates = [each.rate for each in forgotten]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(HOPE, abs=0.01)
    for token, least, most in ((0.05, 10, 60), (0.3, 60, 120)):  # the later the dearer
        tried_again = next(plain for plain, each in enumerate(forgotten) if best_window([each], linear(token)))
        assert least < tried_again < most
        assert best_window([forgotten[tried_again]], linear(token)) == 1


def test_every_place_of_a_window_has_a_chance_of_its_own() -> None:
    first_two = known(*[(2, 4)] * 30)
    assert [first_two.emitted(window) for window in WINDOWS] == pytest.approx([1, 2, 3, 3, 3], abs=0.35)
    assert [best_window([first_two], linear(token)) for token in (0.05, 0.1, 0.3)] == [2, 2, 2]
    assert best_window([known(*[(4, 4)] * 30)], linear(0.1)) == 8  # as long as it was never tried


def test_a_longer_window_is_tried_again_after_a_while_and_not_at_once() -> None:
    noted = [(2, 4)] * 30
    for shorter in range(200):
        if best_window([known(*noted, *[(2, 2)] * shorter)], linear(0.1)) > 2:
            break
    assert 20 < shorter < 100


@given(st.lists(st.integers(0, 8).flatmap(lambda asked: st.tuples(st.integers(0, asked), st.just(asked)))))
def test_a_longer_window_emits_more_and_no_token_for_certain(noted: list[tuple[int, int]]) -> None:
    emitted = [known(*noted).emitted(window) for window in range(10)]
    assert emitted[0] == 1
    assert all(0 < more - less < 1 for less, more in pairwise(emitted))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.floats(0, 3))
def test_no_other_window_emits_more_in_its_time(rates: list[float], token: float) -> None:
    def speed(window: int) -> float:
        return sum(sum(rate**n for n in range(window + 1)) for rate in rates) / (1 + window * token)

    assert speed(best_window(list(map(Even, rates)), linear(token))) == max(map(speed, WINDOWS))


def test_drafts_that_cost_more_than_they_bring_are_not_asked_for() -> None:
    assert [best_window([Even(chance)], linear(0.25)) for chance in (0.1, 0.4, 0.99)] == [0, 1, 8]
    assert [best_window([Even(0.8)], linear(token)) for token in (0.0, 0.1, 0.3, 1.0)] == [8, 8, 4, 0]
    useless, good = Even(0.0), Even(0.99)
    assert best_window([useless, useless, useless, good], linear(0.25)) < best_window([good], linear(0.25))


def counted(*noted: tuple[int, int, float]) -> RoundCosts:
    costs = RoundCosts()
    for batch, window in {(batch, window) for batch, window, _ in noted}:
        costs.note(batch, window, 99.0)  # calls are bound
    for each in noted:
        costs.note(*each)
    return costs


def test_a_round_costs_what_rounds_of_its_rows_took_and_else_what_those_beside_it_suggest() -> None:
    assert [counted().of(4, window) for window in (0, 4)] == [1, 1 + 4 * GUESS]
    one = counted((4, 4, 0.02))
    assert one.of(4, 4) / one.of(4, 0) == pytest.approx(1 + 4 * GUESS)
    two = counted((4, 0, 0.01), (4, 4, 0.02))
    assert [two.of(4, window) for window in (0, 1, 2, 4)] == pytest.approx([0.01, 0.0125, 0.015, 0.02])
    assert two.of(4, 8) == pytest.approx(0.02 * (1 + 8 * GUESS) / (1 + 4 * GUESS))
    assert two.of(8, 0) == 1


def test_a_pause_of_the_machine_makes_no_window_dear_and_what_stays_slow_is_believed_by_and_by() -> None:
    assert counted((1, 2, 0.01), (1, 2, 9.0)).of(1, 2) < 0.011
    assert counted((1, 0, 0.01), (1, 2, 9.0)).of(1, 2) == pytest.approx(0.03)
    assert counted((1, 2, 0.01), *[(1, 2, 0.03)] * 200).of(1, 2) == pytest.approx(0.03)
    assert counted((1, 2, 0.03), (1, 2, 0.01)).of(1, 2) == pytest.approx(0.01)


def test_what_slows_the_machine_makes_all_windows_dearer_and_none_beside_the_others() -> None:
    before = [(1, window, 0.01 + 0.005 * window) for window in (0, 2, 4)]
    for times in (0.5, 2.0):
        after_it = counted(*before * 5, *[(1, 2, times * 0.02)] * 60)
        assert after_it.of(1, 2) == pytest.approx(times * 0.02, rel=0.01)
        for window in (0, 4):
            assert after_it.of(1, window) / after_it.of(1, 2) == pytest.approx(1 + (window - 2) / 4, rel=0.12)


@settings(max_examples=20)
@given(st.integers(0, 1 << 32))
def test_what_every_window_costs_is_learnt_from_rounds_in_any_order(seed: int) -> None:
    noted = [(1, 0, 0.01), (1, 1, 0.02), (1, 4, 0.03)] * 60
    random.Random(seed).shuffle(noted)
    costs = counted(*[(1, 0, 0.015), (1, 1, 0.02), (1, 4, 0.02)] * 4, *noted)
    shares = [costs.of(1, window) / costs.of(1, 1) for window in (0, 1, 4)]
    assert shares == pytest.approx([0.5, 1, 1.5], rel=0.15)


def test_every_window_is_timed_once_and_again_when_it_was_long_not_used() -> None:
    costs, windows = RoundCosts(), [0, 1, 2]

    def asked(rounds: int, used: int) -> list[int]:
        """What is asked for in so many rounds; in the others ``used`` is the window."""
        found = []
        for _ in range(rounds):
            window = costs.due(4, windows)
            found += [] if window is None else [window]
            costs.note(4, used if window is None else window, 0.01)
        return found

    assert asked(200, 1) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert asked(700, 1) == []
    assert asked(200, 1) == [0, 0, 2, 2]
    assert costs.due(2, windows) == 0  # other rows
    costs.measured(2, 0, 0.01)
    assert costs.due(2, windows) is None


def test_a_round_that_was_asked_for_and_not_timed_is_asked_for_again_some_times() -> None:
    """Prompts were read in it, or it waited."""
    costs = RoundCosts()
    assert {costs.due(1, [0, 2]) for _ in range(19)} == {0}
    for _ in range(3):
        costs.note(1, 0, 0.01)
    assert {costs.due(1, [0, 2]) for _ in range(20)} == {2}
    assert costs.due(1, [0, 2]) is None


def test_what_the_opening_timed_holds() -> None:
    costs = RoundCosts()
    for window in (0, 2):
        costs.measured(8, window, 0.01 * (1 + window))
    for _ in range(9):
        costs.note(8, 2, 0.05)
    assert [costs.of(8, window) for window in (0, 1, 2)] == pytest.approx([0.01, 0.02, 0.03])


def test_what_was_timed_in_a_bad_moment_is_known_better_by_and_by() -> None:
    costs = RoundCosts()
    for now in range(1100):
        window = costs.due(1, [0, 4]) or 0
        costs.note(1, window, 0.03 * (9 if now < 10 else 1) if window else 0.01)
        if now == 900:
            assert costs.of(1, 4) / costs.of(1, 0) == pytest.approx(5)  # its tokens one by one
    assert costs.of(1, 4) / costs.of(1, 0) == pytest.approx(3, rel=0.05)


def test_a_request_begins_with_what_others_had_in_the_end() -> None:
    windows = Windows(8, 8, adaptive=True)
    for window in windows.usual(1):
        windows.costs.measured(1, window, 1 + GUESS * window)
    began = []
    for accepted in [8] * 4 + [0] * 16:
        running = make_running([1])
        windows.join(running)
        began.append(windows.drafted([running.acceptance], 1))
        for _ in range(30):
            running.acceptance.note(accepted, 8)
        windows.leave(0)
        windows.leave(0)  # nothing happens
    assert began[:5] == [8] * 5  # also the first
    assert began[5:] == sorted(began[5:], reverse=True)
    assert began[-1] <= 1


def test_a_request_that_comes_back_goes_on_with_what_it_had() -> None:
    windows, running = Windows(8, 8, adaptive=True), make_running([1])
    windows.join(running)
    had = running.acceptance
    had.note(0, 8)
    running.preempt()
    windows.leave(0)
    windows.join(running)
    assert running.acceptance is had


def test_windows_are_few_and_as_long_as_the_option_says_at_most() -> None:
    adaptive = Windows({1: 6, 3: 2}, 8, adaptive=True)
    for window in range(7):
        adaptive.costs.measured(1, window, 1 + GUESS * window)
    assert [adaptive.usual(live) for live in (1, 3)] == [[0, 1, 2, 3, 4, 6], [0, 1, 2]]
    assert Windows(16, 16, adaptive=True).usual(1) == [0, 1, 2, 3, 4, 6, 8, 12, 16]
    assert adaptive.drafted([Even(0.99)], 1) == 6
    assert [adaptive.drafted([Even(0.99)], 1, wanted=wanted) for wanted in (0, 3, 9)] == [0, 3, 6]
    assert adaptive.drafted([Even(0.01)], 1) == 0
    assert adaptive.drafted([Even(0.01)], 1, fixed=True) == 6
    assert Windows(6, 8).drafted([Even(0.01)], 1) == 6
    assert Windows(6, 8, drafts=False).drafted([Even(0.99)], 1) == 0

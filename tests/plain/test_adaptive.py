"""Adaptive draft windows: estimates of acceptance, costs of rounds, and the choice between windows."""

import random
from collections.abc import Sequence
from itertools import pairwise
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.runtime.engine_loop.costs import DEFAULT_TOKEN_COST, RoundCosts
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.llm import host_costs
from tandemrt.runtime.llm.assemble import _adapts
from tandemrt.runtime.llm.host_costs import HostCosts
from tandemrt.runtime.requests.acceptance import DECAY, MAX_TRIED, PRIOR, PRIOR_WEIGHT, Acceptance, best_window
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.running import RunningRequest
from tests.plain.requests import make_running

WINDOWS = [0, 1, 2, 4, 8]


def linear(token: float) -> dict[int, float]:
    """Costs of rounds in which every drafted token costs the same."""
    return {window: 1 + token * window for window in WINDOWS}


def known(*noted: tuple[int, int]) -> Acceptance:
    acceptance = Acceptance()
    for accepted, asked in noted:
        acceptance.observe(accepted, asked)
    return acceptance


def after(*noted: tuple[int, int]) -> float:
    return known(*noted).rate


class Even(Acceptance):
    """Every drafted token has the same acceptance rate."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self._chance = chance

    def expected_tokens(self, window: int) -> float:
        return sum(self._chance**accepted for accepted in range(window + 1))


@given(st.lists(st.integers(0, 8).flatmap(lambda asked: st.tuples(st.integers(0, asked), st.just(asked)))))
def test_an_acceptance_rate_is_between_0_and_1(noted: list[tuple[int, int]]) -> None:
    assert 0 < after(*noted) < 1


def test_the_acceptance_rate_follows_the_last_windows() -> None:
    assert after(*[(4, 4)] * 30) > 0.98
    assert after(*[(0, 4)] * 30) < 0.05
    assert after(*[(4, 4)] * 30, *[(0, 4)] * 120) < 0.1
    assert after(*[(1, 4)] * 100) == pytest.approx(0.5, abs=0.02)  # every second one is rejected


def test_a_rate_weighs_each_tried_token_once_up_to_a_maximum() -> None:
    prior = PRIOR * PRIOR_WEIGHT
    assert after((0, 4)) == pytest.approx((DECAY + prior) / (DECAY + 1 + PRIOR_WEIGHT))
    most = MAX_TRIED + PRIOR_WEIGHT
    assert after(*[(8, 8)] * 9, (0, 1)) == pytest.approx((DECAY * MAX_TRIED + prior) / most, abs=0.005)


def test_useless_drafts_are_tried_again_after_a_while() -> None:
    forgotten = [known(*[(0, 4)] * 9, *[(0, 0)] * plain) for plain in range(300)]
    rates = [each.rate for each in forgotten]
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(PRIOR, abs=0.01)
    for token, least, most in ((0.05, 10, 60), (0.3, 60, 120)):  # the later the dearer
        tried_again = next(plain for plain, each in enumerate(forgotten) if best_window([each], linear(token)))
        assert least < tried_again < most
        assert best_window([forgotten[tried_again]], linear(token)) == 1


def test_every_position_of_a_window_has_its_own_rate() -> None:
    first_two = known(*[(2, 4)] * 30)
    assert [first_two.expected_tokens(window) for window in WINDOWS] == pytest.approx([1, 2, 3, 3, 3], abs=0.35)
    assert [best_window([first_two], linear(token)) for token in (0.05, 0.1, 0.3)] == [2, 2, 2]
    assert best_window([known(*[(4, 4)] * 30)], linear(0.1)) == 8  # as long as it was never tried


def test_a_longer_window_is_tried_again_after_a_while() -> None:
    noted = [(2, 4)] * 30
    for shorter in range(200):
        if best_window([known(*noted, *[(2, 2)] * shorter)], linear(0.1)) > 2:
            break
    assert 20 < shorter < 100


@given(st.lists(st.integers(0, 8).flatmap(lambda asked: st.tuples(st.integers(0, asked), st.just(asked)))))
def test_a_longer_window_is_expected_to_emit_more_but_less_than_one_token_more(noted: list[tuple[int, int]]) -> None:
    emitted = [known(*noted).expected_tokens(window) for window in range(10)]
    assert emitted[0] == 1
    assert all(0 < more - less < 1 for less, more in pairwise(emitted))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.floats(0, 3))
def test_the_best_window_emits_most_tokens_per_time(rates: list[float], token: float) -> None:
    def speed(window: int) -> float:
        return sum(sum(rate**n for n in range(window + 1)) for rate in rates) / (1 + window * token)

    assert speed(best_window(list(map(Even, rates)), linear(token))) == max(map(speed, WINDOWS))


def test_drafts_that_cost_more_than_they_gain_are_not_proposed() -> None:
    assert [best_window([Even(chance)], linear(0.25)) for chance in (0.1, 0.4, 0.99)] == [0, 1, 8]
    assert [best_window([Even(0.8)], linear(token)) for token in (0.0, 0.1, 0.3, 1.0)] == [8, 8, 4, 0]
    useless, good = Even(0.0), Even(0.99)
    assert best_window([useless, useless, useless, good], linear(0.25)) < best_window([good], linear(0.25))


def counted(*noted: tuple[int, int, float]) -> RoundCosts:
    costs = RoundCosts()
    for batch, window in {(batch, window) for batch, window, _ in noted}:
        costs.observe(batch, window, 99.0)  # calls are bound
    for each in noted:
        costs.observe(*each)
    return costs


def test_unknown_costs_are_interpolated_between_windows() -> None:
    assert [counted().estimate(4, window) for window in (0, 4)] == [1, 1 + 4 * DEFAULT_TOKEN_COST]
    one = counted((4, 4, 0.02))
    assert one.estimate(4, 4) / one.estimate(4, 0) == pytest.approx(1 + 4 * DEFAULT_TOKEN_COST)
    two = counted((4, 0, 0.01), (4, 4, 0.02))
    assert [two.estimate(4, window) for window in (0, 1, 2, 4)] == pytest.approx([0.01, 0.0125, 0.015, 0.02])
    assert two.estimate(4, 8) == pytest.approx(0.03)
    assert two.estimate(8, 0) == 1


def test_a_pause_changes_no_cost_and_a_lasting_slowdown_does() -> None:
    assert counted((1, 2, 0.01), (1, 2, 9.0)).estimate(1, 2) < 0.011
    assert counted((1, 0, 0.01), (1, 2, 9.0)).estimate(1, 2) == pytest.approx(0.03)
    assert counted((1, 2, 0.01), *[(1, 2, 0.03)] * 200).estimate(1, 2) == pytest.approx(0.03)
    assert counted((1, 2, 0.03), (1, 2, 0.01)).estimate(1, 2) == pytest.approx(0.01)


def test_a_slower_machine_raises_the_cost_of_all_windows() -> None:
    before = [(1, window, 0.01 + 0.005 * window) for window in (0, 2, 4)]
    for times in (0.5, 2.0):
        after_it = counted(*before * 5, *[(1, 2, times * 0.02)] * 60)
        assert after_it.estimate(1, 2) == pytest.approx(times * 0.02, rel=0.01)
        for window in (0, 4):
            assert after_it.estimate(1, window) / after_it.estimate(1, 2) == pytest.approx(
                1 + (window - 2) / 4, rel=0.12
            )


@settings(max_examples=20)
@given(st.integers(0, 1 << 32))
def test_costs_do_not_depend_on_the_order_of_rounds(seed: int) -> None:
    noted = [(1, 0, 0.01), (1, 1, 0.02), (1, 4, 0.03)] * 60
    random.Random(seed).shuffle(noted)
    costs = counted(*[(1, 0, 0.015), (1, 1, 0.02), (1, 4, 0.02)] * 4, *noted)
    shares = [costs.estimate(1, window) / costs.estimate(1, 1) for window in (0, 1, 4)]
    assert shares == pytest.approx([0.5, 1, 1.5], rel=0.15)


def test_every_window_is_timed_first_and_again_soon_and_after_many_rounds_without_it() -> None:
    costs, windows = RoundCosts(), [0, 1, 2]

    def asked(rounds: int, used: int) -> list[int]:
        """The windows requested in so many rounds; the other rounds use ``used``."""
        requested = []
        for _ in range(rounds):
            window = costs.due(4, windows)
            requested += [] if window is None else [window]
            costs.observe(4, used if window is None else window, 0.01)
        return requested

    assert asked(30, 1) == [0, 0, 0, 1, 1, 1]  # the cost of 2 follows from theirs until it is used
    assert asked(200, 1) == [0, 0]
    assert asked(700, 1) == []
    assert asked(400, 1) == [2, 2, 0, 0]
    assert costs.due(2, windows) == 0  # other rows
    costs.calibrate(2, 0, 0.01)
    assert costs.due(2, windows) is None


def test_where_the_cost_of_a_token_is_known_no_round_is_timed_for_it() -> None:
    costs = RoundCosts(token_cost=0.5)
    assert costs.due(1, [0, 1, 4]) is None
    assert costs.estimate(1, 4) == 3 * costs.estimate(1, 0)
    for _ in range(2):
        costs.observe(1, 4, 6.0)
    assert costs.estimate(1, 0) == 2.0
    assert costs.due(1, [0, 1, 4]) is None


@pytest.mark.parametrize(("at_once", "fourth"), [(False, 0.5), (True, 0.1)])
def test_costs_on_a_cpu_follow_from_the_sizes_of_weights(at_once: bool, fourth: float) -> None:
    """A draft of half the target's weights: a call per token, or a call with a row per token."""
    costs = HostCosts(0.5, at_once)
    plain = costs.scoring(1, 0)
    assert costs.drafting(1, 1) == 0.5 * plain
    assert costs.drafting(1, 4) - costs.drafting(1, 3) == pytest.approx(fourth * (1 if at_once else plain))
    rounds = costs.scoring(1, 4) + costs.drafting(1, 4)
    assert plain * (1 + 4 * costs.token(4)) == pytest.approx(rounds)


@pytest.mark.parametrize(
    ("megabytes", "avx2", "adapts"), [(500, True, True), (500, False, False), (1, True, False), (1, False, False)]
)
def test_lengths_adapt_on_a_cpu_where_fixed_ones_may_lose(
    monkeypatch: pytest.MonkeyPatch, megabytes: int, avx2: bool, adapts: bool
) -> None:
    """A large model whose integer matmuls have AVX2 alone."""
    files = {"target/a": Mock(size=megabytes << 20), "draft/a": Mock(size=megabytes << 19)}
    files["draft/borrowed.safetensors"] = Mock(size=megabytes << 18)
    bundle = Mock(manifest=Mock(files=files), draft=Mock(traits=DRAFT_KINDS["model"], engines=("draft",)))
    monkeypatch.setattr(host_costs, "multiplies_with_avx2", lambda: avx2)
    costs = HostCosts.of(bundle)
    assert costs.weights == 0.75
    assert costs.missed == (0.2 if adapts else 0.1)
    assert _adapts(bundle, RuntimeOptions(), costs) == adapts
    assert not _adapts(bundle, RuntimeOptions(num_draft_tokens=4), costs)
    assert _adapts(bundle, RuntimeOptions(adaptive_draft_tokens=True), costs)
    bundle.draft.traits = DRAFT_KINDS["assistant"]  # it reads one row of the embedding that it borrows
    assert HostCosts.of(bundle).weights == 0.5
    bundle.draft.engines = ()
    assert not _adapts(bundle, RuntimeOptions(), costs)


def test_a_requested_round_that_is_not_timed_is_requested_again() -> None:
    """A round with prompts or waits is not timed."""
    costs = RoundCosts()
    assert {costs.due(1, [0, 2]) for _ in range(19)} == {0}
    for _ in range(3):
        costs.observe(1, 0, 0.01)
    assert [costs.due(1, [0, 2]) for _ in range(21)] == [2] * 20 + [None]


def test_calibrated_costs_keep_their_differences_and_follow_the_level_of_rounds() -> None:
    costs = RoundCosts()
    for window in (0, 2):
        costs.calibrate(8, window, 0.01 * (1 + window))
    assert [costs.estimate(8, window) for window in (0, 1, 2)] == pytest.approx([0.01, 0.02, 0.03])
    for _ in range(200):
        costs.observe(8, 2, 0.05)
    assert [costs.estimate(8, window) for window in (0, 1, 2)] == pytest.approx([0.03, 0.04, 0.05], rel=0.01)
    costs.observe(8, 2, 5.0)  # a pause of the machine
    assert costs.estimate(8, 2) < 0.052


def test_a_cost_timed_in_a_slow_moment_is_corrected() -> None:
    costs = RoundCosts()
    for now in range(100):
        window = costs.due(1, [0, 4]) or 0
        costs.observe(1, window, 0.03 * (9 if now < 10 else 1) if window else 0.01)
        if now == 30:
            assert costs.estimate(1, 4) / costs.estimate(1, 0) == pytest.approx(5)  # its tokens one by one
    assert costs.estimate(1, 4) / costs.estimate(1, 0) == pytest.approx(3, rel=0.05)


def test_a_request_starts_from_the_acceptance_of_ended_requests() -> None:
    windows = DraftWindowPlanner(8, 8, adaptive=True)
    for window in windows.usual(1):
        windows.costs.calibrate(1, window, 1 + DEFAULT_TOKEN_COST * window)
    began = []
    for accepted in [8] * 4 + [0] * 16:
        running = make_running([1])
        windows.join(running)
        began.append(windows.choose([running], 1))
        for _ in range(30):
            windows.observe(running, accepted, 8)
        running.finish(Finish("stop"))
        windows.leave(0)
        windows.leave(0)  # nothing happens
    assert began[:5] == [8] * 5  # also the first
    assert began[5:] == sorted(began[5:], reverse=True)
    assert began[-1] <= 1


def test_a_preempted_request_keeps_its_acceptance_and_counts_once() -> None:
    """Five preemptions of one request weigh in later requests as much as none."""
    rates = []
    for preemptions in (0, 5):
        windows, running = DraftWindowPlanner(8, 8, adaptive=True), make_running([1])
        for _ in range(preemptions):
            windows.join(running)
            running.preempt()
            windows.leave(0)
        windows.join(running)
        for _ in range(30):
            windows.observe(running, 0, 8)
        acceptance = windows._acceptance[running]
        running.preempt()
        windows.leave(0)
        windows.join(running)
        assert windows._acceptance[running] is acceptance
        for _ in range(preemptions):
            running.preempt()
            windows.leave(0)
            windows.join(running)
        running.finish(Finish("stop"))
        windows.leave(0)
        rates.append(windows._ended.rate)
    assert rates[0] == rates[1]


def test_a_busy_engine_tries_one_window_without_graphs_at_a_time() -> None:
    windows, useless = DraftWindowPlanner(4, 4, adaptive=True), make_running([1])
    windows.join(useless)
    windows.uncaptured = {1, 2}
    for _ in range(60):
        windows.observe(useless, 0, 4)
    chosen = []
    for _ in range(1400):
        window = windows.choose([useless], 1)
        windows.costs.observe(1, window, 1 + 0.3 * window)
        windows.observe_round(1, window, 0)
        windows.observe(useless, 0, window)
        chosen.append(window)
    firsts = sorted((chosen.index(window), window) for window in set(chosen))
    assert {window for at, window in firsts if at < 255} == {0, 4}
    assert all(later - earlier >= 200 for (earlier, _), (later, _) in pairwise(firsts[1:]))
    assert chosen.count(0) > 0.9 * len(chosen), "long before the engine is idle"


def planned(windows: DraftWindowPlanner, running: RunningRequest, accepts: Sequence[bool]) -> tuple[list[int], float]:
    """Rounds on a CPU that accept all drafts or none, one per entry: their windows, and what was lost, in rounds."""
    chosen, lost, missed = list[int](), 0.0, 0
    for accepting in accepts:
        window = windows.choose([running], 1, missed=missed)
        accepted = window if accepting else 0
        windows.observe(running, accepted, window)
        windows.observe_round(1, window, accepted, missed=missed)
        lost += 0.5 * window + (0.5 * (1 + 0.1 * missed) if window and missed else 0) - accepted
        missed = 0 if window else missed + 1
        chosen.append(window)
    return chosen, lost


def test_useless_drafts_lose_little_however_much_their_drafter_has_missed() -> None:
    """A late trial would make it process all of a long text."""
    windows, running = DraftWindowPlanner(4, 4, adaptive=True, missed_cost=0.1, token_cost=0.5), make_running([1])
    windows.join(running)
    assert planned(windows, running, [False] * 400)[1] < 4


@pytest.mark.parametrize("rejected", [1, 2])
def test_a_first_text_whose_first_tokens_are_rejected_gets_drafts_all_the_same(rejected: int) -> None:
    """A small model seldom guesses the first word of an answer, and often those after it."""
    windows = DraftWindowPlanner(4, 4, adaptive=True, missed_cost=0.2, token_cost=0.53)
    windows.join(running := make_running([1]))
    chosen, lost = planned(windows, running, [False] * rejected + [True] * 25)
    assert chosen[-1] == 4
    assert lost < -20


def test_a_text_that_begins_hard_is_soon_tried_again_on_a_host() -> None:
    windows = DraftWindowPlanner(4, 4, adaptive=True, missed_cost=0.1, token_cost=0.5)
    windows.join(easy := make_running([1]))
    assert planned(windows, easy, [True] * 20)[1] < 0
    easy.finish(Finish("stop"))
    windows.leave(0)
    windows.join(hard := make_running([1]))
    chosen, _ = planned(windows, hard, [False] * 2 + [True] * 30)
    assert all(any(chosen[at : at + 5]) for at in range(27))
    assert chosen[-1] >= 3


@given(st.lists(st.integers(0, 4), max_size=300))
def test_drafts_that_earn_less_than_they_cost_lose_at_most_a_few_rounds(accepted: list[int]) -> None:
    """Whatever estimates promise: here they promise that every draft is accepted."""
    windows, running = DraftWindowPlanner(4, 4, adaptive=True), make_running([1])
    for window in windows.usual(1):
        windows.costs.calibrate(1, window, 1 + window)
    windows.join(running)
    lost = largest = 0.0
    for kept in accepted:
        window = windows.choose([running], 1)
        lost = max(0.0, lost + window - min(kept, window))
        largest = max(largest, lost)
        windows.observe_round(1, window, min(kept, window))
    assert largest <= 12 + 4 + 0.006 * len(accepted) + 1e-6, "the budget, and the round that exceeds it"


def test_a_choice_for_many_requests_holds_for_some_rounds() -> None:
    windows = DraftWindowPlanner(4, 4, adaptive=True)
    many = [make_running([1], slot=slot) for slot in range(32)]
    for each in windows.usual(32):
        windows.costs.calibrate(32, each, 1 + DEFAULT_TOKEN_COST * each)
    for running in many:
        windows.join(running)
    assert windows.choose(many, 32) == 4
    for running in many:
        for _ in range(60):
            windows.observe(running, 0, 4)
    assert [windows.choose(many, 32) for _ in range(5)] == [4, 4, 4, 0, 0]
    assert windows.choose(many, 32, wanted=2) == 0


def test_rounds_with_prompts_draft_nothing_or_the_largest_window() -> None:
    windows = DraftWindowPlanner(4, 4, adaptive=True)
    good, poor, useless = (make_running([1]) for _ in range(3))
    for each in windows.usual(1):
        windows.costs.calibrate(1, each, 1 + DEFAULT_TOKEN_COST * each)
    for running, accepted in ((good, 4), (poor, 1), (useless, 0)):
        windows.join(running)
        for _ in range(60):
            windows.observe(running, accepted, 4)
    chosen = [
        [windows.choose([each], 1, prompts=prompts) for each in (good, poor, useless)] for prompts in (False, True)
    ]
    assert chosen == [[4, 1, 0], [4, 4, 0]]
    assert windows.choose([poor], 1, wanted=3, prompts=True) == 3


def test_adaptive_windows_are_few_and_within_the_limit() -> None:
    adaptive = DraftWindowPlanner({1: 6, 3: 2}, 8, adaptive=True)
    for window in range(7):
        adaptive.costs.calibrate(1, window, 1 + DEFAULT_TOKEN_COST * window)
    assert [adaptive.usual(live) for live in (1, 3)] == [[0, 1, 2, 3, 4, 6], [0, 1, 2]]
    assert DraftWindowPlanner(16, 16, adaptive=True).usual(1) == [0, 1, 2, 3, 4, 6, 8, 12, 16]
    good, useless = make_running([1]), make_running([1])
    for running, accepted in ((good, 6), (useless, 0)):
        adaptive.join(running)
        for _ in range(60):
            adaptive.observe(running, accepted, 6)
    assert adaptive.choose([good], 1) == 6
    assert [adaptive.choose([good], 1, wanted=wanted) for wanted in (0, 3, 9)] == [0, 3, 6]
    assert adaptive.choose([useless], 1) == 0
    assert adaptive.choose([useless], 1, fixed=True) == 6
    assert DraftWindowPlanner(6, 8).choose([useless], 1) == 6
    assert DraftWindowPlanner(6, 8, drafts=False).choose([good], 1) == 0

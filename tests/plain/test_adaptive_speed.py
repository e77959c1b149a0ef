"""Adaptive draft windows against the best fixed one, in a simulated clock.

Rounds cost what a table says, and drafts are accepted with given rates. The cost of exploring is included. As in the
overlap schedule, a window is chosen before the last round is committed.
"""

import random
from collections.abc import Sequence
from itertools import count, cycle
from typing import Any

import pytest

from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.running import RunningRequest
from tests.plain import simulated_rounds
from tests.plain.requests import make_running
from tests.plain.simulated_rounds import best_fixed, expected

MOST = 4
LENGTH, TOKENS = 200, 3000  # of a text, and of all texts of a measure
Chances = Sequence[float]  # of each drafted token, if those before it were accepted

ROUNDS = {  # rows, and the cost of a round by its window
    "an H200": (1, [4.67, 4.79, 4.95, 5.12, 5.28]),  # ms
    "an H200, 16 requests": (16, [5.20, 5.51, 5.84, 6.10, 6.38]),
    "an H200, the costs of 64 requests": (16, [7.20, 8.09, 9.51, 11.1, 12.7]),
    "a CPU": (1, [1, 1.15, 1.3, 1.45, 1.6]),
    "a CPU, a large draft, 4 requests": (4, [1, 1.3, 1.6, 1.9, 2.2]),
}
# Qwen3-30B-A3B's shape on an H200, ms: without drafts and with 4 (docs/data/rounds-experts.csv), and between them.
WITH_EXPERTS = {
    "30B-A3B, 1 request": (1, [3.55, 4.18, 4.81, 5.44, 6.07]),
    "30B-A3B, 16 requests": (16, [11.91, 13.77, 15.64, 17.5, 19.36]),
}
# The same with 12 layers and skewed routers, of a run before that of docs/data/adaptive-experts.csv.
WITH_SKEWED_EXPERTS = {
    1: [0.986, 1.43, 1.813, 2.18, 2.53],
    4: [1.457, 2.115, 2.637, 3.089, 3.533],
    16: [2.344, 3.19, 3.84, 4.43, 5.02],
    64: [3.518, 4.796, 6.115, 6.57, 7.284],
}
# Of a round without drafts, by window. H200: an 8B shape with an EAGLE-3 head, useless drafts of adaptive-gpu.csv and
# rounds-bf16.csv; experts, of which longer windows read more: rounds-gpt-oss.csv; a CPU: the demo with random drafts,
# adaptive-cpu.csv, and Qwen2.5-Coder 1.5B with the 0.5B as draft.
MEASURED = {
    ("H200", 1): [1, 1.029, 1.06, 1.098, 1.134],
    ("H200, bfloat16", 1): [1, 1.089, 1.179, 1.268, 1.357],
    ("H200", 8): [1, 1.104, 1.209, 1.313, 1.418],
    ("H200", 16): [1, 1.055, 1.127, 1.149, 1.22],
    ("H200", 32): [1, 1.134, 1.268, 1.402, 1.536],
    ("H200", 64): [1, 1.129, 1.314, 1.488, 1.767],
    ("gpt-oss-20b", 1): [1, 1.283, 1.566, 1.849, 2.133],
    ("gpt-oss-20b", 16): [1, 1.234, 1.468, 1.702, 1.936],
    ("gpt-oss-20b", 64): [1, 1.366, 1.731, 2.097, 2.463],
    ("CPU", 1): [1, 1.105, 1.294, 1.387, 1.515],
    ("CPU, a pair", 1): [1, 1.65, 2.3, 2.95, 3.6],
    ("CPU, a pair", 4): [1, 1.65, 2.3, 2.95, 3.6],
}
ROUNDS_OF = {1: 5000, 4: 3000, 8: 1200, 16: 1200, 32: 1200, 64: 1500}  # by rows
ACCEPTANCE = {
    1.0: 0.0,
    1.2: 0.168,
    1.5: 0.345,
    2.0: 0.519,
    3.0: 0.724,
    4.5: 0.948,
}  # tokens a round of 4 drafts: chance
USELESS, USEFUL = [0.0] * MOST, [0.9] * MOST
DRAFTS = {
    "useless": [USELESS],
    **{f"{chance} each": [[chance] * MOST] for chance in (0.1, 0.3, 0.5, 0.7, 0.9)},
    **{f"exactly {count}": [[1.0] * count + [0.0] * (MOST - count)] for count in (1, 2, 3)},
    "less and less": [[0.8, 0.6, 0.4, 0.2]],
    "useless to every second request": [USELESS, USEFUL],
    "mixed": [USELESS, USEFUL, [0.5] * MOST],
}


def accepted(chances: Chances, window: int, chance: random.Random) -> int:
    return next((place for place in range(window) if chance.random() >= chances[place]), window)


def speed(
    windows: DraftWindowPlanner, rows: int, costs: Sequence[float], drafts: Sequence[Chances], *, most: int = TOKENS
) -> float:
    """Tokens per unit of time, of consecutive texts in ``rows`` slots."""
    chance, kinds, time, tokens = random.Random(7), cycle(drafts), 0.0, 0
    live: dict[int, tuple[RunningRequest, Chances, int]] = {}
    last: list[tuple[RunningRequest, int, int]] = []
    while tokens < most:
        for slot in range(rows):
            if slot not in live:
                running = make_running([1], slot=slot)
                windows.join(running)
                live[slot] = running, next(kinds), LENGTH
        window = windows.choose([running for running, _, _ in live.values()], rows)
        time += costs[window]
        windows.costs.observe(rows, window, costs[window])
        for running, kept, drafted in last:
            windows.observe(running, kept, drafted)
        if last:
            windows.observe_round(rows, last[0][2], sum(kept for _, kept, _ in last) / len(last))
        last = []
        for slot, (running, chances, left) in list(live.items()):
            kept = accepted(chances, window, chance)
            last.append((running, kept, window))
            tokens += kept + 1
            live[slot] = running, chances, left - kept - 1
            if left <= kept + 1:
                end(windows, running)
                del live[slot]
    for running, _, _ in live.values():
        end(windows, running)
    return tokens / time


def end(windows: DraftWindowPlanner, running: RunningRequest) -> None:
    running.finish(Finish("stop"))
    windows.leave(running.slot)


def adapting(rows: int, costs: Sequence[float], *, of_texts: float = 0.0) -> DraftWindowPlanner:
    """``of_texts``: what cached tokens cost a round; the planner does not know it at first."""
    windows = DraftWindowPlanner(MOST, MOST, adaptive=True)
    for window, cost in enumerate(costs):
        windows.costs.calibrate(rows, window, cost - of_texts)
    return windows


def adapting_on_a_cpu(*, token_cost: float) -> DraftWindowPlanner:
    """A drafter that was not run there must first process what it missed. ``token_cost``: of a drafted token."""
    return DraftWindowPlanner(MOST, MOST, adaptive=True, calibrates=False, missed_cost=0.1, token_cost=token_cost)


@pytest.mark.parametrize(
    ("where", "length"),
    [(where, length) for where in MEASURED for length in (ACCEPTANCE if where[1] < 16 else (1.0, 1.5))],
)
def test_at_any_acceptance_adaptive_windows_never_lose_to_autoregressive_decoding(
    where: tuple[str, int], length: float
) -> None:
    costs, rows, chances = MEASURED[where], where[1], [ACCEPTANCE[length]] * MOST
    on_cpu = where[0].startswith("CPU")
    on_host: Any = {"missed_cost": 0.1, "token_cost": (costs[-1] - 1) / MOST} if on_cpu else {}
    windows = DraftWindowPlanner(MOST, MOST, adaptive=True, calibrates=False, **on_host)
    reached = simulated_rounds.speed(windows, rows, costs, chances, rounds=ROUNDS_OF[rows])
    assert reached >= 0.99 * costs[0]
    assert reached >= (0.95 if on_cpu else 0.97) * best_fixed(costs, chances)


@pytest.mark.parametrize(
    ("where", "length"), [(("gpt-oss-20b", 1), 1.0), (("gpt-oss-20b", 16), 1.0), (("H200", 1), 4.5)]
)
def test_windows_without_graphs_lose_nothing_to_autoregressive_decoding(where: tuple[str, int], length: float) -> None:
    """Graphs of shorter windows are captured one at a time, long after useless drafts have ended."""
    costs, rows, chances = MEASURED[where], where[1], [ACCEPTANCE[length]] * MOST
    windows = DraftWindowPlanner(MOST, MOST, adaptive=True, calibrates=False)
    windows.uncaptured = {rows}
    reached = simulated_rounds.speed(windows, rows, costs, chances, rounds=ROUNDS_OF[rows])
    assert reached >= 0.99 * costs[0]
    assert reached >= 0.97 * best_fixed(costs, chances)


@pytest.mark.parametrize("rows", WITH_SKEWED_EXPERTS)
def test_slow_first_rounds_of_a_batch_do_not_make_drafts_lose(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy host makes the first rounds slow, so windows that were timed then look too expensive."""
    costs, chances, counted = WITH_SKEWED_EXPERTS[rows], [ACCEPTANCE[2.0]] * MOST, count()
    windows = DraftWindowPlanner(MOST, MOST, adaptive=True, calibrates=False)
    observe = windows.costs.observe

    def slow_at_first(batch: int, window: int, seconds: float) -> None:
        observe(batch, window, seconds * (1.5 if next(counted) < 8 else 1.0))

    monkeypatch.setattr(windows.costs, "observe", slow_at_first)
    reached = simulated_rounds.speed(windows, rows, costs, chances, rounds=600)
    assert reached >= 0.99 / costs[0]
    assert reached >= 0.94 * best_fixed(costs, chances)


@pytest.mark.parametrize("seed", range(7, 13))
def test_rejected_drafts_of_new_texts_do_not_end_drafting_of_a_batch_on_a_cpu(seed: int) -> None:
    """With seed 8 two rounds rejected half of the drafts, and then too many tokens were missed to draft again."""
    rows, chances = 4, [ACCEPTANCE[4.5]] * MOST
    costs = MEASURED["CPU, a pair", rows]
    windows = adapting_on_a_cpu(token_cost=0.65)
    reached = simulated_rounds.speed(windows, rows, costs, chances, rounds=1500, seed=seed)
    assert reached >= 0.97 * best_fixed(costs, chances)


@pytest.mark.parametrize("seed", [7, 8])
@pytest.mark.parametrize(
    ("useless", "length", "share"), [(1000, 4.5, 0.95), (1000, 3.0, 0.95), (4000, 1.0, 0.99), (0, 1.5, 0.95)]
)
def test_a_busy_batch_on_a_cpu_drafts_again_after_useless_drafts(
    seed: int, useless: int, length: float, share: float
) -> None:
    """Texts begin and end at different times, so the drafter has always missed hundreds of tokens."""
    rows, costs, rounds = 4, ROUNDS["a CPU, a large draft, 4 requests"][1], 4000
    chances = [ACCEPTANCE[length]] * MOST
    windows = adapting_on_a_cpu(token_cost=0.3)
    reached = simulated_rounds.speed(
        windows, rows, costs, chances, rounds=rounds, seed=seed, useless=useless, lengths=(50, 350)
    )
    fixed = [useless + (rounds - useless) * expected(chances, window) for window in range(MOST + 1)]
    assert reached >= 0.99
    assert reached >= share * max(tokens / rounds / cost for tokens, cost in zip(fixed, costs, strict=True))


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_adaptive_windows_are_nearly_as_fast_as_the_best_fixed_window(rounds: str, drafts: str) -> None:
    rows, costs = ROUNDS[rounds]
    fixed = [speed(DraftWindowPlanner(window, MOST), rows, costs, DRAFTS[drafts]) for window in range(MOST + 1)]
    assert speed(adapting(rows, costs), rows, costs, DRAFTS[drafts]) >= 0.97 * max(fixed)


@pytest.mark.parametrize("drafts", ["0.5 each", "0.7 each", "0.9 each", "less and less", "exactly 3", "mixed"])
def test_adaptive_windows_lose_at_most_one_percent_to_the_largest(drafts: str) -> None:
    rows, costs = ROUNDS["an H200, the costs of 64 requests"]
    largest = speed(DraftWindowPlanner(MOST, MOST), rows, costs, DRAFTS[drafts])
    assert speed(adapting(rows, costs, of_texts=3.0), rows, costs, DRAFTS[drafts]) >= 0.99 * largest


@pytest.mark.parametrize(
    ("rounds", "drafts"),
    [*(("30B-A3B, 1 request", drafts) for drafts in DRAFTS), ("30B-A3B, 16 requests", "useless")],
)
def test_windows_of_experts_are_nearly_as_fast_as_the_best_one_although_rounds_are_timed_with_texts(
    rounds: str, drafts: str
) -> None:
    rows, costs = WITH_EXPERTS[rounds]
    of_rows, most = DRAFTS[drafts], TOKENS if rows == 1 else 8 * TOKENS
    fixed = [speed(DraftWindowPlanner(window, MOST), rows, costs, of_rows, most=most) for window in range(MOST + 1)]
    reached = speed(DraftWindowPlanner(MOST, MOST, adaptive=True, calibrates=False), rows, costs, of_rows, most=most)
    assert reached >= 0.95 * max(fixed)
    assert reached >= 0.98 * fixed[0], "speculation costs next to nothing where it does not pay"


@pytest.mark.parametrize("before", [None, USEFUL, USELESS])
def test_a_text_of_useless_drafts_on_a_cpu_loses_one_percent_at_most(before: Chances | None) -> None:
    costs = MEASURED["CPU, a pair", 1]
    windows = adapting_on_a_cpu(token_cost=0.65)
    if before is not None:
        speed(windows, 1, costs, [before], most=5 * LENGTH)
    assert speed(windows, 1, costs, [USELESS], most=LENGTH) >= 0.99


@pytest.mark.parametrize("before", [0, 4000])
def test_a_useless_text_on_a_cpu_loses_one_percent_at_most_after_a_long_text(before: int) -> None:
    """The rounds of one slot; a drafter catches up with what it missed."""
    costs, lengths = MEASURED["CPU, a pair", 1], [before] * (before > 0) + [LENGTH] * 12
    windows = adapting_on_a_cpu(token_cost=0.65)
    for length in lengths:
        reached = simulated_rounds.speed(windows, 1, costs, USELESS, rounds=length, lengths=(length, length))
        assert reached >= 0.99 * best_fixed(costs, USELESS)


@pytest.mark.parametrize("rounds", [name for name, (rows, _) in ROUNDS.items() if rows == 1])
def test_a_request_unlike_earlier_ones_loses_little(rounds: str) -> None:
    rows, costs = ROUNDS[rounds]
    for before, itself, share in ((USEFUL, USELESS, 0.97), (USELESS, USEFUL, 0.8)):
        windows = adapting(rows, costs)
        speed(windows, rows, costs, [before])
        fixed = [
            speed(DraftWindowPlanner(window, MOST), rows, costs, [itself], most=LENGTH) for window in range(MOST + 1)
        ]
        assert speed(windows, rows, costs, [itself], most=LENGTH) >= share * max(fixed)

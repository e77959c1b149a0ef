"""Adaptive draft windows against the best fixed one, in a simulated clock.

Rounds cost what a table says, and drafts are accepted with given rates. The cost of exploring is included. As in the
overlap schedule, a window is chosen before the last round is committed.
"""

import random
from collections.abc import Sequence
from itertools import cycle

import pytest

from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.running import RunningRequest
from tests.plain.requests import make_running

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
        for running, kept, asked in last:
            windows.observe(running, kept, asked)
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
    windows = DraftWindowPlanner(MOST, MOST, adapts_from=0)
    for window, cost in enumerate(costs):
        windows.costs.calibrate(rows, window, cost - of_texts)
    return windows


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
    reached = speed(DraftWindowPlanner(MOST, MOST, adapts_from=0, calibrates=False), rows, costs, of_rows, most=most)
    assert reached >= 0.95 * max(fixed)
    assert reached >= 0.98 * fixed[0], "speculation costs next to nothing where it does not pay"


@pytest.mark.parametrize("rounds", [name for name, (rows, _) in ROUNDS.items() if rows == 1])
def test_a_request_unlike_earlier_ones_loses_little(rounds: str) -> None:
    rows, costs = ROUNDS[rounds]
    for before, itself, share in ((USEFUL, USELESS, 0.97), (USELESS, USEFUL, 0.95)):
        windows = adapting(rows, costs)
        speed(windows, rows, costs, [before])
        fixed = [
            speed(DraftWindowPlanner(window, MOST), rows, costs, [itself], most=LENGTH) for window in range(MOST + 1)
        ]
        assert speed(windows, rows, costs, [itself], most=LENGTH) >= share * max(fixed)

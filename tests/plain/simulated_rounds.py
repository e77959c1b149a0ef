"""Rounds in a simulated clock: they cost what was measured, and drafts are accepted by chance.

The planner is that of the engine loop. As in the overlap schedule, it chooses a window before the last round is
committed.
"""

import random
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner
from tandemrt.runtime.requests.request import Finish
from tandemrt.runtime.requests.running import RunningRequest
from tests.plain.requests import make_running

Chances = Sequence[float]  # of each drafted token, if those before it were accepted
LENGTH = 200  # tokens of a text


def expected(chances: Chances, window: int) -> float:
    """Return the tokens that a round with ``window`` drafted tokens emits on average."""
    return 1 + sum(accumulate(chances[:window], mul))


def best_fixed(costs: Sequence[float], chances: Chances) -> float:
    """Return the tokens per unit of time and request of the best fixed window."""
    return max(expected(chances, window) / cost for window, cost in enumerate(costs))


def speed(
    planner: DraftWindowPlanner,
    rows: int,
    costs: Sequence[float],
    chances: Chances,
    *,
    rounds: int,
    seed: int = 7,
    useless: int = 0,
    lengths: tuple[int, int] | None = None,
) -> float:
    """Return the expected tokens per unit of time and request, of consecutive texts in ``rows`` slots.

    ``costs``: of a round, by window. A drafter that was not run processes the tokens that it missed before it drafts.
    ``useless``: rounds at first in which all drafts are rejected. ``lengths``: the least and the most tokens of a text,
    which differ at random.
    """
    chance, seconds, tokens = random.Random(seed), 0.0, 0.0
    texts: dict[int, tuple[RunningRequest, int]] = {}  # by slot: the request, and its tokens that are left
    last: list[tuple[RunningRequest, int]] = []
    counted = 0  # tokens that the drafter caught up with in the last round
    window, missed = 0, dict.fromkeys(range(rows), 0)
    for at in range(rounds):
        now = [0.0] * len(chances) if at < useless else chances
        for slot in range(rows):
            if slot not in texts:
                running = make_running([1], slot=slot)
                planner.join(running)
                # They do not end together.
                texts[slot] = running, chance.randint(*lengths) if lengths else LENGTH - slot
                missed[slot] = 0
        before, missed_before = window, sum(missed.values()) if planner.missed_cost else 0
        window = planner.choose([running for running, _ in texts.values()], rows, missed=missed_before)
        seconds += costs[window]
        if window and missed_before:
            seconds += (costs[1] - costs[0]) * (1 + planner.missed_cost * missed_before)
        tokens += expected(now, window)
        if not (window and missed_before):
            planner.costs.observe(rows, window, costs[window])
        for running, accepted in last:
            planner.observe(running, accepted, before)
        if last:
            accepted_by_all = sum(accepted for _, accepted in last)
            planner.observe_round(rows, before, accepted_by_all / len(last), missed=counted)
        last, counted = [], missed_before
        for slot, (running, left) in list(texts.items()):
            accepted = next((place for place in range(window) if chance.random() >= now[place]), window)
            last.append((running, accepted))
            missed[slot] = 0 if window else missed[slot] + 1
            texts[slot] = running, left - accepted - 1
            if left <= accepted + 1:
                running.finish(Finish("stop"))
                planner.leave(slot)
                del texts[slot]
    return tokens / seconds

"""The chance that all drafted tokens are accepted, by the draft's own probabilities."""

import numpy as np
import pytest

from tandemrt.runtime.drafters.confidence import Confidence
from tandemrt.runtime.engine_loop.draft_windows import DraftWindowPlanner


def logits(*chances: list[float]) -> np.ndarray:
    return np.log(np.array(chances, np.float32)) + 7  # any offset


def test_chances_multiply_over_the_window_and_average_over_the_requests() -> None:
    confidence = Confidence([0, 2])
    first = logits([0.5, 0.3, 0.2], [1.0, 1e-9, 1e-9], [0.1, 0.8, 0.1])
    assert confidence.follow(first, np.array([0, 0, 1])) == pytest.approx((0.5 + 0.8) / 2)
    second = logits([0.25, 0.25, 0.5], [1.0, 1e-9, 1e-9], [0.9, 0.05, 0.05])
    assert confidence.follow(second, np.array([2, 0, 0])) == pytest.approx((0.25 + 0.72) / 2)


def test_a_token_that_could_not_be_drafted_ends_the_window_of_its_row() -> None:
    confidence = Confidence([0, 1])
    assert confidence.follow(logits([0.5, 0.5], [0.5, 0.5]), np.array([-1, 1])) == pytest.approx(0.25)


def test_a_draft_with_a_part_of_the_vocabulary_has_its_own_columns() -> None:
    column_of = np.zeros(10, np.int64)
    column_of[[3, 7]] = 0, 1
    assert Confidence([0], column_of).follow(logits([0.4, 0.6]), np.array([7])) == pytest.approx(0.6)


def test_a_token_must_promise_what_its_time_is_worth() -> None:
    windows = DraftWindowPlanner(4, 4, adaptive=True)
    assert windows.least_gain(1, 4) == 0, "rounds are timed first"
    for window in range(5):
        windows.costs.calibrate(1, window, 1 + 0.25 * window)
    for _ in range(200):
        windows.observe_round(1, 4, 3.0)  # 4 tokens in the time of 2 rounds without drafts
    assert windows.least_gain(1, 4) == pytest.approx(0.25 * 2, rel=0.01)
    assert windows.least_gain(1, 0) == 0
    assert DraftWindowPlanner(4, 4).least_gain(1, 4) == 0

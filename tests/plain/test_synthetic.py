"""How many drafted tokens the rule for benchmarks accepts, and the rows that make verification accept them."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.runtime.constraints.rows import MaskRows
from tandemrt.runtime.engine_loop.synthetic import accept_synthetic, num_accepted, synthetic_rate
from tandemrt.runtime.grammars import bitmask
from tests.plain.constraints import tokens_in
from tests.plain.requests import make_running

WINDOW = 4


def free() -> np.ndarray:
    return np.full((WINDOW + 1, 8), -1, np.int32)


def accepted(mean: float, tokens: list[int], position: int, rows: np.ndarray) -> int:
    running = make_running(prompt=[0] * position, rule="synthetic", synthetic_acceptance_length=mean)
    return accept_synthetic(mean, running, tokens, MaskRows(rows), 0)


@pytest.mark.parametrize("mean", [1.0, 1.3, 2.0, 3.5, 5.0])
def test_synthetic_acceptance_has_its_mean_and_accepts_each_token_equally_often(mean: float) -> None:
    running, masks, counts = make_running(rule="synthetic", synthetic_acceptance_length=mean), MaskRows(free()), []
    for _ in range(4000):
        counts.append(accept_synthetic(mean, running, [1, 2, 3, 4], masks, 0))
        running.tokens.append(0)
    assert abs(1 + np.mean(counts) - mean) < 0.06
    reached = [np.sum(np.array(counts) >= at) for at in range(WINDOW + 1)]
    rates = [now / before for before, now in pairwise(reached) if before > 400]
    assert max(rates) - min(rates) < 0.08


def test_a_shorter_window_accepts_the_same_tokens_as_far_as_it_goes() -> None:
    running, masks = make_running(rule="synthetic", synthetic_acceptance_length=3.0), MaskRows(free())
    for _ in range(50):
        whole, half = (accept_synthetic(3.0, running, tokens, masks, 0) for tokens in ([1, 2, 3, 4], [1, 2]))
        assert half == min(whole, 2)
        running.tokens.append(0)


@given(mean=st.floats(1, 5), tokens=st.lists(st.integers(0, 255), max_size=WINDOW), position=st.integers(1, 99))
def test_rows_accept_the_given_number_of_drafts_and_reject_the_next(
    mean: float, tokens: list[int], position: int
) -> None:
    rows = free()
    count = accepted(mean, tokens, position, rows)
    assert count <= len(tokens)
    for at, token in enumerate(tokens[: count + 1]):
        assert bitmask.allows(rows[at], token) == (at < count)
        assert bitmask.only(rows[at]) == (token if at < count else None)
    assert all(len(tokens_in(row)) == 256 for row in rows[len(tokens[: count + 1]) :])


def test_the_only_allowed_token_is_not_rejected() -> None:
    rows = np.zeros((WINDOW + 1, 8), np.int32)
    bitmask.allow(rows[0], 7)
    assert accepted(1.0, [7], 1, rows) == 0
    assert bitmask.only(rows[0]) == 7


@given(
    st.lists(
        st.tuples(st.floats(1, 5), st.integers(0, 2**64 - 1), st.integers(1, 10_000), st.integers(0, WINDOW)),
        min_size=1,
    )
)
def test_many_rows_accept_what_each_would_alone(rows: list[tuple[float, int, int, int]]) -> None:
    means, seeds, lengths, counts = zip(*rows, strict=True)
    rates = np.array([synthetic_rate(mean, WINDOW) for mean in means])
    alone = []
    for mean, seed, length, count in rows:
        running = make_running(rule="synthetic", synthetic_acceptance_length=mean)
        running.request.seed, running.tokens = seed, [0] * length
        alone.append(accept_synthetic(mean, running, [1, 2, 3, 4][:count], MaskRows(free()), 0))
    together = num_accepted(rates, np.array(seeds, np.uint64), np.array(lengths), np.array(counts))
    assert together.tolist() == alone

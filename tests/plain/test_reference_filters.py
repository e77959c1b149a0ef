"""Temperature, top-n-sigma, top-k, top-p and min-p, in that order. Ties are kept."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tandemrt.plugins.reference import filter_logits, probabilities
from tandemrt.plugins.reference.arguments import sampling_vectors
from tandemrt.plugins.reference.filters import standard_deviation


def scores_of(logits, temperature=1.0, **filters):
    rows = np.asarray(logits, np.float32)
    vectors = sampling_vectors(1, temperature=temperature, seed=0, position=0, rule="coupled", **filters)
    return filter_logits(rows[None], vectors)[0]


def kept(probabilities, **filters):
    with np.errstate(divide="ignore"):
        row = np.log(np.asarray(probabilities, np.float64))
    return np.flatnonzero(np.isfinite(scores_of(row[None], **filters)[0])).tolist()


@pytest.mark.parametrize("vocab", [5, 33, 1000])
@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.3},
        {"top_k": 7},
        {"top_p": 0.83},
        {"min_p": 0.07},
        {"temperature": 1.7, "top_k": 20, "top_p": 0.9, "min_p": 0.03},
        {"temperature": 0.6, "top_k": 2000, "top_p": 0.05},
    ],
    ids=str,
)
def test_the_filters_equal_those_of_transformers(vocab, filters):
    """The reference is transformers' warpers in their own order, on rows without ties."""
    logits = 3 * np.random.default_rng(vocab).normal(size=(20, vocab)).astype(np.float32)
    warpers = [TemperatureLogitsWarper(filters.get("temperature", 1.0))]
    warpers += [TopKLogitsWarper(filters["top_k"])] if "top_k" in filters else []
    warpers += [TopPLogitsWarper(filters["top_p"])] if "top_p" in filters else []
    warpers += [MinPLogitsWarper(filters["min_p"])] if "min_p" in filters else []
    expected = torch.from_numpy(logits).double()
    for warper in warpers:
        expected = warper(None, expected)
    np.testing.assert_allclose(probabilities(scores_of(logits, **filters)), expected.softmax(-1).numpy(), rtol=1e-5)


def test_top_k_keeps_every_token_that_ties_with_the_last():
    assert kept([0.1, 0.3, 0.1, 0.4, 0.1], top_k=3) == [0, 1, 2, 3, 4]
    assert kept([0.1, 0.3, 0.1, 0.4, 0.1], top_k=2) == [1, 3]


def test_top_p_counts_strictly_more_probable_tokens():
    assert kept([0.25, 0.25, 0.25, 0.25], top_p=0.1) == [0, 1, 2, 3]
    assert kept([0.4, 0.2, 0.2, 0.2], top_p=0.41) == [0, 1, 2, 3]
    assert kept([0.5, 0.25, 0.25], top_p=0.5) == [0]


def test_top_p_applies_to_the_renormalized_mass_after_top_k():
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.65) == [0, 1]
    assert kept([0.4, 0.3, 0.2, 0.1], top_k=3, top_p=0.44) == [0]  # 0.4 / 0.9 > 0.44
    assert kept([0.4, 0.3, 0.2, 0.1], top_p=0.44) == [0, 1]


def test_min_p_is_relative_to_the_most_probable_token():
    assert kept([0.5, 0.25, 0.15, 0.1], min_p=0.49) == [0, 1]
    assert kept([0.5, 0.25, 0.15, 0.1], min_p=0.51) == [0]
    assert kept([0.3, 0.3, 0.4], min_p=1.0) == [2]


def test_top_n_sigma_counts_deviations_of_the_tokens_that_are_not_masked():
    """The deviation of 0, -1, -2 and -3 is 1.118; that of -1e30 has no part in it."""
    masked = [0.0, -1.0, -2.0, -3.0, -np.inf]
    for n, expected in ((0.89, [0]), (0.9, [0, 1]), (1.8, [0, 1, 2]), (2.7, [0, 1, 2, 3])):
        scores = scores_of([masked], top_n_sigma=n, temperature=0.3)
        assert np.flatnonzero(np.isfinite(scores[0])).tolist() == expected


def test_top_n_sigma_keeps_a_token_exactly_at_its_bound():
    assert np.isfinite(scores_of([[1.0, -3.0]], top_n_sigma=2)).all()  # a deviation of 2
    assert np.isfinite(scores_of([[5.0, 5.0, 5.0, -np.inf]], top_n_sigma=1e-30)[0, :3]).all()


def test_the_filters_after_top_n_sigma_work_on_the_tokens_that_it_left():
    logits = [0.0, -1.0, -2.0, -3.0]
    assert np.flatnonzero(np.isfinite(scores_of([logits], top_n_sigma=1, top_p=0.73)[0])).tolist() == [0]  # 0.731 of 2
    assert np.flatnonzero(np.isfinite(scores_of([logits], top_p=0.73)[0])).tolist() == [0, 1]


_ROWS = st.lists(
    st.lists(st.floats(-(2.0**99), 2.0**99, width=32) | st.floats(-9, 9, width=32) | st.just(-np.inf), min_size=1),
    min_size=1,
    max_size=3,
)


@given(_ROWS, st.randoms(use_true_random=False))
def test_the_deviation_of_a_row_has_the_same_bits_in_any_order_and_batch(rows, random):
    """And it is that of numpy, but for the rounding of distances to 2^-38 of the row's range."""
    width = max(map(len, rows))
    batch = np.array([[*row, *[-np.inf] * (width - len(row))] for row in rows], np.float32)
    deviations = standard_deviation(batch)[:, 0]
    for row, deviation in zip(rows, deviations, strict=True):
        shuffled = random.sample(row, len(row))
        assert standard_deviation(np.array(shuffled, np.float32))[0] == deviation
        finite = np.array(row, np.float64)[np.isfinite(row)]
        if finite.size:
            extent = finite.max() - finite.min()
            np.testing.assert_allclose(deviation, finite.std(), rtol=1e-6, atol=2.0**-18 * extent)
        else:
            assert deviation == 0


@pytest.mark.parametrize(
    "off", [{}, {"top_k": 0}, {"top_k": 4}, {"top_p": 0}, {"top_p": 1.0}, {"min_p": 0}, {"top_n_sigma": 0}], ids=str
)
def test_a_disabled_filter_keeps_every_token(off):
    assert kept([0.7, 0.2, 0.1, 1e-30], **off) == [0, 1, 2, 3]


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}, {"top_n_sigma": 1e-30}], ids=str)
def test_the_most_probable_token_always_stays(filters):
    assert kept([0.2, 0.5, 0.0, 0.3], **filters) == [1]


def test_a_masked_token_is_never_kept():
    assert kept([0.5, 0.0, 0.5], top_k=3, top_p=0.999999, min_p=0.0) == [0, 2]


def test_a_tiny_temperature_cannot_overflow():
    np.testing.assert_array_equal(probabilities(scores_of([[1e30, 1e29, -1e38]], temperature=1e-30)), [[1, 0, 0]])

"""Speculation emits exactly the distribution of autoregressive decoding, for any draft.

The joint distribution of the first K+1 tokens, over as many rounds as they take, is enumerated and compared with 50,000
requests of different seeds. The seeds are fixed, so a result never changes: a fair program lies within 4 standard
deviations, and every trap below lies far outside.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tandemrt.engines.contract.sampling_parameters import FILTERS
from tandemrt.plugins.operators.constants import Purpose
from tandemrt.plugins.reference import filter_logits, position_noise, probabilities, sample_draft
from tandemrt.plugins.reference.arguments import sampling_vectors
from tests.plain.tiny_language import Language, speculate, surprise

REQUESTS = 50_000
FAIR = 4.0
BIASED = 12.0

open_language = partial(Language.random, 5, masked=False)
filtered_language = partial(Language.random, 6, masked=True, top_k=5, top_p=0.93, min_p=0.02)


def misfit(language, *, rule, window, length=None, **changes):
    length = length or window + 1
    outcome = speculate(language, rule=rule, window=window, length=length, requests=REQUESTS, **changes)
    text_distribution = language.exact_distribution(length)
    return surprise(np.bincount(language.index(outcome.text), minlength=text_distribution.size), text_distribution)


sigma_language = partial(Language.random, 6, masked=True, top_n_sigma=1.5, top_p=0.97)


PENALTIES = {"bias": np.float32([0.5, 0, -0.7, 0, 0, 1]), "presence": 0.4, "frequency": 0.8, "repetition": 1.5}


def penalized_language():
    return replace(filtered_language(), penalties=PENALTIES)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("make", [open_language, filtered_language], ids=["open", "masked and filtered"])
def test_the_text_has_the_distribution_of_the_target(make, rule, window):
    """Regressions S4, S7 and S9: mask, temperature and filters at every row; distributions that depend on the
    prefix."""
    assert misfit(make(), rule=rule, window=window) < FAIR


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_text_has_the_distribution_of_a_target_cut_at_a_deviation(rule):
    """The deviation of a row leaves out the token that its mask forbids."""
    language = sigma_language()
    removed = (language.target_probs() == 0).mean()
    assert 0.4 < removed < 0.7  # the mask removes one of six
    assert misfit(language, rule=rule, window=2, length=3) < FAIR


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_text_has_the_distribution_of_the_penalized_target(rule):
    """What a penalty counts differs from row to row and from request to request; the drafts ignore it."""
    assert misfit(penalized_language(), rule=rule, window=2, length=3) < FAIR


def test_penalties_that_ignore_the_drafts_of_their_window_are_detected(monkeypatch):
    """Control: every row penalized by what stands before the window."""
    penalized = Language.penalized

    def forgetful(self, logits, text, draft):
        return penalized(self, logits, text, np.full_like(draft, -1))

    language = penalized_language()
    expected = language.exact_distribution(3)
    monkeypatch.setattr(Language, "penalized", forgetful)
    text = speculate(language, rule="rejection", window=2, length=3, requests=REQUESTS).text
    assert surprise(np.bincount(language.index(text), minlength=expected.size), expected) > BIASED


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_the_distribution_holds_for_drafts_that_were_not_drawn(rule):
    """An n-gram or greedy draft has no distribution of its own: it is one-hot."""

    def chosen(logits, **_):
        return np.argmax(logits, axis=-1), None

    assert misfit(filtered_language(), rule=rule, window=3, drafter=chosen) < FAIR


def scaled(scale, *, reported=None):
    """A drafter whose temperature is ``scale`` times the request's; its distribution is reported as if it were
    ``reported``."""

    def drafter(logits, *, temperature, **request):
        claimed = scale if reported is None else reported
        token, _ = sample_draft(logits, temperature=scale * temperature, **request)
        return token, sample_draft(logits, temperature=claimed * temperature, **request)[1]

    return drafter


@pytest.mark.parametrize("scale", [0.25, 3.0])
def test_the_distribution_holds_for_drafts_with_their_own_temperature(scale):
    assert misfit(filtered_language(), rule="rejection", window=1, drafter=scaled(scale)) < FAIR


def test_reporting_a_scaled_draft_as_unscaled_is_detected():
    """Control: the rejection rule must read the scaled distribution."""
    assert misfit(open_language(), rule="rejection", window=1, drafter=scaled(0.25, reported=1.0)) > BIASED


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_draft_that_is_its_target_but_flatter_is_always_right_once_it_is_scaled(rule):
    language = open_language()
    flatter = replace(language, draft=language.target / 2)
    counts = [
        speculate(flatter, rule=rule, window=1, length=1, requests=2000, drafter=scaled(scale)) for scale in (1, 0.5)
    ]
    assert counts[0].accepted < counts[0].drafts
    assert counts[1].accepted == counts[1].drafts


def test_the_coupled_rule_is_independent_of_its_drafts():
    """Drafts from any stream, even the residual's, leave the distribution unchanged: only the rejection rule can be
    misled."""
    assert misfit(open_language(), rule="coupled", window=2, drafter=drawn_with(Purpose.RESIDUAL)) < FAIR


@pytest.mark.parametrize("language", [open_language(), filtered_language()], ids=["open", "masked and filtered"])
def test_every_token_of_a_refused_first_draft_follows_the_residual(language):
    """Regression S7's condition: there are at least two tokens that a residual could give."""
    target, draft = language.target_probs()[0, 0], language.distributions(language.draft)[0, 0]
    assert (target > draft).sum() >= 2


def drawn_with(purpose):
    """A drafter that is right except for its stream of noise."""

    def drafter(logits, *, seed, position, **request):
        vectors = sampling_vectors(len(logits), **request, seed=seed, position=position)
        scores = filter_logits(logits[:, None], vectors)[:, 0]
        return np.argmax(scores + position_noise(seed, position, purpose, logits.shape[-1]), axis=-1), probabilities(
            scores
        )

    return drafter


def test_a_draft_that_shares_the_noise_of_the_residual_is_detected():
    """Control: one stream for draft and residual is a bias that others shipped."""
    assert misfit(open_language(), rule="rejection", window=2, drafter=drawn_with(Purpose.RESIDUAL)) > BIASED
    assert misfit(open_language(), rule="rejection", window=2, drafter=drawn_with(Purpose.DRAFT)) < FAIR


def test_reporting_another_draft_distribution_is_detected():
    """Control for S9: drafts filtered, their distribution reported unfiltered. Acceptance rises, so a benchmark
    likes it."""

    def misreported(logits, **request):
        token, _ = sample_draft(logits, **request)
        return token, sample_draft(logits, **{name: value for name, value in request.items() if name not in FILTERS})[1]

    assert misfit(filtered_language(), rule="rejection", window=2, drafter=misreported) > BIASED


def test_filters_that_skip_the_drafted_rows_are_detected():
    """Control for S4: a target without filters is not the filtered target."""
    language = filtered_language()
    unfiltered = Language(language.target, language.draft, language.mask)
    text = speculate(unfiltered, rule="coupled", window=2, length=3, requests=REQUESTS).text
    expected = language.exact_distribution(3)
    assert surprise(np.bincount(language.index(text), minlength=expected.size), expected) == np.inf


def before_the_refused_token(allowed):
    return np.cumprod(allowed, axis=-1).sum(axis=-1)


def with_the_refused_token(allowed):
    return np.minimum(before_the_refused_token(allowed) + 1, allowed.shape[1])


def test_the_rejection_rule_must_see_a_masked_draft_token():
    """A window cut before a refused draft draws from the target where the residual is due: a bias.

    The window may end after the refused token. The coupled rule is not affected.
    """
    language = filtered_language()
    check = partial(misfit, language, window=3)
    assert check(rule="rejection", usable=before_the_refused_token) > BIASED
    assert check(rule="rejection", usable=with_the_refused_token) < FAIR
    assert check(rule="coupled", usable=before_the_refused_token) < FAIR


def overlap(language):
    """Σ min(p, q) of the first position, where every request stands in the same state."""
    target, draft = language.target_probs()[0, 0], language.distributions(language.draft)[0, 0]
    return np.minimum(target, draft).sum()


@pytest.mark.parametrize("make", [open_language, filtered_language], ids=["open", "masked and filtered"])
def test_rejection_accepts_as_often_as_the_distributions_overlap(make):
    """Regression S9: Σ min(p, q), not less and above all not more."""
    language = make()
    outcome = speculate(language, rule="rejection", window=1, length=1, requests=REQUESTS)
    rate, expected = outcome.accepted / outcome.drafts, overlap(language)
    assert abs(rate - expected) < 4 * np.sqrt(expected * (1 - expected) / REQUESTS)


@pytest.mark.parametrize("make", [open_language, filtered_language], ids=["open", "masked and filtered"])
def test_coupled_acceptance_lies_between_its_bound_and_the_overlap(make):
    """At least (1 − TV) / (1 + TV), TV the distance of the two distributions; at most 1 − TV, which no coupling can
    pass."""
    language = make()
    outcome = speculate(language, rule="coupled", window=1, length=1, requests=REQUESTS)
    distance, margin = 1 - overlap(language), 4 * np.sqrt(0.25 / REQUESTS)
    rate = outcome.accepted / outcome.drafts
    assert (1 - distance) / (1 + distance) - margin < rate < 1 - distance + margin

"""Temperature, top-n-sigma, top-k, top-p and min-p: from logits to the distribution of a token."""

import numpy as np

from tandemrt.engines.contract.sampling_parameters import SIGMA_UNITS
from tandemrt.plugins.reference.arguments import Sampling

_NEG_INF = np.float32(-np.inf)


def finite_logits(logits: np.ndarray) -> np.ndarray:
    """Return float32 logits with −inf for values that are not finite: such a token cannot be drawn."""
    values = np.asarray(logits).astype(np.float32)
    return np.where(np.isfinite(values), values, _NEG_INF)


def filter_logits(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return the scaled and filtered scores of every row, float32 [batch, rows, vocab], −inf for filtered tokens.

    The scores are (logit − largest logit of the row) / temperature. The shift does not change the
    distribution, and avoids overflow at small temperatures. The filters then apply in this order. They keep ties, so
    that the result does not depend on the order of a sort:

    * top-n-sigma keeps a token iff its score is at least −n · sigma / temperature, where sigma is the standard
      deviation of the row's finite logits;
    * top-k keeps a token iff its score reaches the k-th largest;
    * top-p keeps a token iff strictly more probable tokens hold less than ``top_p`` of the mass that top-k left;
    * min-p keeps a token iff it has at least ``min_p`` times the probability of the most probable one.

    Temperature 0 scales by 1; the scores of such a greedy request are not used.
    """
    temperature, min_p = sampling["temperature"], sampling["min_p"]
    temperature = np.where(temperature > 0, temperature, np.float32(1))
    peak = np.max(logits, axis=-1, keepdims=True)
    with np.errstate(over="ignore"):  # a score below the range of float32 is −inf, which is correct
        scores = (logits - np.where(np.isfinite(peak), peak, np.float32(0))) / temperature[:, None, None]
    scores = _top_n_sigma(scores, logits, sampling["top_n_sigma"], temperature)
    scores = _top_p(_top_k(scores, sampling["top_k"]), sampling["top_p"])
    if not (min_p > 0).any():
        return scores
    return np.where(np.exp(scores, dtype=np.float64) >= min_p[:, None, None], scores, _NEG_INF)


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Return the probabilities of scores whose largest is 0: softmax in float64, rounded to float32 once.

    Equal scores give equal bits, so a draft from the same distribution is always accepted. An empty row gives zeros.
    """
    weights = np.exp(scores, dtype=np.float64)
    total = weights.sum(axis=-1, keepdims=True)
    probs: np.ndarray = (weights / np.where(total > 0, total, 1.0)).astype(np.float32)
    return probs


def standard_deviation(logits: np.ndarray) -> np.ndarray:
    """Return the standard deviation of the finite logits of every row, float64 [..., 1]; 0 for a row without any.

    It is that of a population. Distances from the largest logit, and their squares, are rounded to multiples of 2⁻³⁸ of
    the row's range and of its square. The sums are therefore integers, below 2⁶³ for 2²⁴ tokens: any order of the
    tokens and any implementation gives the same bits.
    """
    finite = np.isfinite(logits)
    peak = np.max(logits, axis=-1, keepdims=True)
    peak = np.where(np.isfinite(peak), peak, np.float32(0))
    values = np.where(finite, logits, peak)
    extent = peak.astype(np.float64) - values.min(axis=-1, keepdims=True)
    distance = (peak - values.astype(np.float64)) * (1 / np.where(extent > 0, extent, 1))
    count = np.maximum(finite.sum(axis=-1, keepdims=True), 1)
    mean, mean_square = (
        np.rint(terms * SIGMA_UNITS).astype(np.int64).sum(axis=-1, keepdims=True) / count / SIGMA_UNITS
        for terms in (distance, distance * distance)
    )
    deviation: np.ndarray = extent * np.sqrt(np.maximum(mean_square - mean * mean, 0))
    return deviation


def _top_n_sigma(scores: np.ndarray, logits: np.ndarray, n: np.ndarray, temperature: np.ndarray) -> np.ndarray:
    if not (n > 0).any():
        return scores
    factor, divisor = (values.astype(np.float64)[:, None, None] for values in (n, temperature))
    threshold = -(factor * standard_deviation(logits)) / divisor
    return np.where((factor == 0) | (scores >= threshold), scores, _NEG_INF)


def _top_k(scores: np.ndarray, top_k: np.ndarray) -> np.ndarray:
    vocab = scores.shape[-1]
    active = (top_k > 0) & (top_k < vocab)
    if not active.any():  # sorting a vocabulary is slow
        return scores
    kept = np.where(active, top_k, vocab)
    ascending = np.sort(scores, axis=-1)
    last = np.take_along_axis(ascending, np.broadcast_to(vocab - kept[:, None, None], (*scores.shape[:-1], 1)), axis=-1)
    return np.where(scores >= last, scores, _NEG_INF)


def _top_p(scores: np.ndarray, top_p: np.ndarray) -> np.ndarray:
    active = ((top_p > 0) & (top_p < 1))[:, None, None]
    if not active.any():
        return scores
    descending = -np.sort(-scores, axis=-1)
    mass = np.cumsum(np.exp(descending, dtype=np.float64), axis=-1)
    before = np.concatenate((np.zeros_like(mass[..., :1]), mass[..., :-1]), axis=-1)
    inside = before < top_p.astype(np.float64)[:, None, None] * mass[..., -1:]
    # The smallest score inside is the threshold: tied scores have the same mass strictly above them.
    threshold = np.where(inside, descending, np.float32(np.inf)).min(axis=-1, keepdims=True)
    return np.where(~active | (scores >= threshold), scores, _NEG_INF)

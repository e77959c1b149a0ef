"""Choose a token of a row of logits by numpy: the coupled rule, in a tenth of the graph's time.

plugins/reference/verify.py defines the result. Noise is bounded, so only tokens near the best one can be drawn, and
only their noise is computed.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.constants import Purpose
from tandemrt.plugins.reference.filters import standard_deviation
from tandemrt.plugins.reference.noise import token_noise

_Floats = npt.NDArray[np.float32]
_Columns = npt.NDArray[np.intp]

_MOST_NOISE = 17.34  # rounded up; see position_noise
_REACH = 20.25  # a token further below the best one is never drawn, even if that one has the least noise, -2.86
_LIKELY = 4.0  # tokens whose noise comes first: their best sum often excludes all others


class RowSampling(NamedTuple):
    """The sampling parameters of one row, with a temperature above 0."""

    temperature: np.float32
    top_n_sigma: np.float32
    top_k: int
    top_p: np.float32
    min_p: np.float32
    seed: int
    position: int


def drawn_column(logits: _Floats, sampling: RowSampling, target_ids: npt.NDArray[np.integer] | None = None) -> int:
    """Return the column that the coupled rule draws from ``logits`` [vocab], whose largest value is finite.

    ``target_ids``: see ``sample_draft``.
    """
    with np.errstate(over="ignore"):
        scores = (logits - logits.max()) / sampling.temperature
    columns = np.flatnonzero(scores >= -_REACH)
    columns = columns[_is_kept(scores, scores[columns], logits, sampling)]
    upper = scores[columns]
    likely = upper >= -_LIKELY
    best, total = _best(upper[likely], columns[likely], sampling, target_ids)
    possible = upper >= total - _MOST_NOISE
    if np.count_nonzero(possible) == np.count_nonzero(likely):
        return best
    return _best(upper[possible], columns[possible], sampling, target_ids)[0]


def _best(
    scores: _Floats, columns: _Columns, sampling: RowSampling, target_ids: npt.NDArray[np.integer] | None
) -> tuple[int, float]:
    """Return the column with the largest sum of score and noise, and that sum."""
    tokens = columns if target_ids is None else target_ids[columns]
    totals = scores + token_noise(sampling.seed, sampling.position, Purpose.SAMPLE, tokens)
    best = int(totals.argmax())
    return int(columns[best]), float(totals[best])


def _is_kept(scores: _Floats, upper: _Floats, logits: _Floats, sampling: RowSampling) -> npt.NDArray[np.bool_]:
    """Return which of ``upper``, the scores within reach, the filters keep."""
    least = np.float64(-np.inf)
    if sampling.top_n_sigma > 0:
        deviation = standard_deviation(logits)[0]
        least = -(np.float64(sampling.top_n_sigma) * deviation) / np.float64(sampling.temperature)
    if 0 < sampling.top_k < len(upper):
        least = max(least, np.float64(np.partition(upper, -sampling.top_k)[-sampling.top_k]))
    if 0 < sampling.top_p < 1:
        descending = -np.sort(-upper[upper >= least])
        mass = np.exp(descending, dtype=np.float64).cumsum()
        total = mass[-1] if least >= -_REACH else np.exp(scores[scores >= least], dtype=np.float64).sum()
        before = np.concatenate((np.zeros(1), mass[:-1]))
        least = np.float64(descending[before < np.float64(sampling.top_p) * total][-1])
    kept: npt.NDArray[np.bool_] = upper >= least
    if sampling.min_p > 0:
        kept &= np.exp(upper, dtype=np.float64) >= sampling.min_p
    return kept

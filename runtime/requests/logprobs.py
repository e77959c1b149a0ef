"""Log-probabilities of emitted tokens and of the likeliest alternatives."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandemrt.engines.parameters.sampling import SamplingParams

_BLOCK = 128  # values per partial maximum in the search for the largest ones


@dataclass(frozen=True)
class TokenLogprobs:
    """The logprob of one output token.

    Attributes:
        token: the token's id.
        logprob: natural logarithm of the token's probability; -inf if the distribution excludes the token, which is
            possible for the distribution of raw logits.
        top: the likeliest tokens and their logprobs, in descending order; fewer if fewer tokens are possible.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. JSON has no infinity, so -inf becomes -9999, as in the OpenAI API."""
        top = [{"token": token, "logprob": logprob} for token, logprob in self.top]
        return {"token": self.token, "logprob": max(-9999.0, self.logprob), "top": top}


def token_logprobs(
    logits: np.ndarray, masks: np.ndarray | None, tokens: Sequence[int], params: SamplingParams
) -> list[TokenLogprobs]:
    """Return the logprobs of ``tokens``, each under the distribution of its row.

    Args:
        logits: floating [rows, vocab]: with biases and penalties, or raw, as ``params.logprobs_mode`` asks.
        masks: int32 [rows, words], the allowed tokens; None: all.
        params: "processed" applies masks, temperature and filters. Temperature 0 counts as 1, without filters.
    """
    from tandemrt.plugins.reference.arguments import sampling_vectors  # few requests ask for logprobs
    from tandemrt.plugins.reference.filters import filter_logits, finite_logits

    rows = finite_logits(logits[: len(tokens)])
    if params.logprobs_mode == "processed":
        if masks is not None:
            bits = np.unpackbits(masks[: len(tokens)].view(np.uint8), axis=1, bitorder="little")[:, : rows.shape[1]]
            rows = np.where(bits, rows, np.float32(-np.inf))
        if params.temperature > 0:
            vectors = sampling_vectors(
                len(rows),
                temperature=params.temperature,
                seed=0,
                position=0,
                rule="coupled",
                **params.filter_values(),
            )
            rows = filter_logits(rows[:, None], vectors)[:, 0]
    return [_one_token(row, token, params.logprobs or 0) for row, token in zip(rows, tokens, strict=True)]


def _one_token(row: np.ndarray, token: int, count: int) -> TokenLogprobs:
    values = row.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    likeliest = _likeliest(values, count)
    top = tuple((int(each), float(values[each])) for each in likeliest if np.isfinite(values[each]))
    return TokenLogprobs(token, float(values[token]), top)


def _likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """Return the ids of the ``count`` largest values in descending order; among equal values, lower ids first."""
    if not count:
        return np.empty(0, np.int64)
    count = min(count, len(values))
    blocks = values[: len(values) // _BLOCK * _BLOCK].reshape(-1, _BLOCK).max(axis=1)
    # ``count`` blocks hold a value of at least ``least``, so the largest values do too. This saves sorting all values.
    least = np.partition(blocks, -count)[-count] if len(blocks) >= count else -np.inf
    likely = np.flatnonzero(values >= least)
    return likely[np.argsort(-values[likely], kind="stable")][:count]

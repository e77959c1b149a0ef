"""How likely the tokens of an output were, and what else was likely, under the law that each was drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandemrt.engines.params import SamplingParams
from tandemrt.plugins.reference.arguments import Sampling
from tandemrt.plugins.reference.filters import filter_logits, finite_logits

_BLOCK = 128  # values of which the largest is looked for first


@dataclass(frozen=True)
class TokenLogprobs:
    """One token of an output.

    Attributes:
        token: its id.
        logprob: the natural logarithm of its probability; -inf if the law does not hold it (that of raw logits may
            not hold what was written).
        top: the likeliest tokens and theirs, the likeliest first; fewer where the law holds fewer.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]

    def to_json(self) -> dict[str, Any]:
        """JSON has no infinity: what cannot be is as unlikely as OpenAI has it, -9999."""
        top = [{"token": token, "logprob": logprob} for token, logprob in self.top]
        return {"token": self.token, "logprob": max(-9999.0, self.logprob), "top": top}


def token_logprobs(
    logits: np.ndarray, masks: np.ndarray | None, tokens: Sequence[int], params: SamplingParams
) -> list[TokenLogprobs]:
    """Say of ``tokens`` how likely they were by the rows that decided them.

    ``logits`` floating [rows, vocab] are biased and penalized, or raw where ``params`` ask for that law; ``masks``
    int32 [rows, words] say what was allowed (None: everything). The law of temperature 0 is that of temperature 1,
    without filters.
    """
    rows = finite_logits(logits[: len(tokens)])
    if params.logprobs_law == "sampled":
        if masks is not None:
            bits = np.unpackbits(masks[: len(tokens)].view(np.uint8), axis=1, bitorder="little")[:, : rows.shape[1]]
            rows = np.where(bits, rows, np.float32(-np.inf))
        if params.temperature > 0:
            sampling = Sampling.of(
                len(rows),
                temperature=params.temperature,
                top_k=max(0, params.top_k),
                top_p=params.top_p,
                min_p=params.min_p,
                seed=0,
                position=0,
                rule="coupled",
            )
            rows = filter_logits(rows[:, None], sampling)[:, 0]
    return [_of(row, token, params.logprobs or 0) for row, token in zip(rows, tokens, strict=True)]


def _of(row: np.ndarray, token: int, count: int) -> TokenLogprobs:
    values = row.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    likeliest = _likeliest(values, count)
    top = tuple((int(each), float(values[each])) for each in likeliest if np.isfinite(values[each]))
    return TokenLogprobs(token, float(values[token]), top)


def _likeliest(values: np.ndarray, count: int) -> np.ndarray:
    """The ids of the ``count`` largest, the largest first, of equal ones the lower id."""
    if not count:
        return np.empty(0, np.int64)
    count = min(count, len(values))
    blocks = values[: len(values) // _BLOCK * _BLOCK].reshape(-1, _BLOCK).max(axis=1)
    # So many blocks hold a value that is as large, so those asked for are: a vocabulary is not sorted for a few of it.
    least = np.partition(blocks, -count)[-count] if len(blocks) >= count else -np.inf
    found = np.flatnonzero(values >= least)
    return found[np.argsort(-values[found], kind="stable")][:count]

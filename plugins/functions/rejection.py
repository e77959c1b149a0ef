"""The rejection rule in standard operators: a uniform per drafted token, and one draw for the row after the accepted.

All tensors have window + 1 rows, the last without a draft, because onnxruntime cannot reduce a tensor without rows.
"""

import numpy as np

from tandemrt.plugins.functions.body import FLOAT32, FLOAT64, INT64, BodyValue
from tandemrt.plugins.functions.draft_window import NO_TOKEN, DraftWindow
from tandemrt.plugins.functions.filters import probabilities
from tandemrt.plugins.operators.constants import REJECTION_STRIDE, Purpose

_LEAST_PROBABILITY = np.float64(2.0**-126)  # as in reference/verify.py


class Proposal:
    """Distributions of the drafts: ``probs`` [batch, K, vocab] for rows with any mass, else one-hot."""

    def __init__(self, window: DraftWindow, probs: BodyValue | None) -> None:
        self.window = window
        self.body = body = window.body
        self.tokens = window.extended(body.where(window.in_vocab, window.draft, NO_TOKEN), NO_TOKEN)
        self.index = body.op("Max", self.tokens, np.int64(0)).expand_dims(-1)
        self.probs = None
        if probs is not None:
            last = body.full(body.concat(window.batch, np.array([1], np.int64), window.vocab, axis=0), np.float32(0))
            self.probs = body.concat(body.where(probs > np.float32(0), probs, np.float32(0)), last, axis=1)
            self.drawn = (self.tokens >= np.int64(0)) & (self.probs.max_last(keepdims=False) > np.float32(0))

    def of_token(self) -> BodyValue:
        """Return q of each drafted token, float64 [batch, rows]."""
        if self.probs is None:
            return self.body.full(self.body.op("Shape", self.tokens), np.float64(1))
        q = self.probs.at_last(self.index).squeeze(-1)
        return self.body.where(self.drawn, q, np.float32(1)).cast(FLOAT64)

    def of_row(self, row: BodyValue) -> BodyValue:
        """Return q of every token at one row per request, float32 [batch, vocab]."""
        one_hot = self._one_hot(self.tokens.at_rows(row))
        if self.probs is None:
            return one_hot
        drawn = self.drawn.cast(INT64).at_rows(row).expand_dims(-1) > np.int64(0)
        return self.body.where(drawn, self.probs.at_rows(row), one_hot)

    def of_rows(self) -> BodyValue:
        """Return q of every token, float32 [batch, rows, vocab]."""
        one_hot = self._one_hot(self.tokens)
        return one_hot if self.probs is None else self.body.where(self.drawn.expand_dims(-1), self.probs, one_hot)

    def _one_hot(self, tokens: BodyValue) -> BodyValue:
        return tokens.expand_dims(-1).equals(self.body.arange(self.window.vocab)).cast(FLOAT32)


def reject(
    window: DraftWindow,
    scores: BodyValue,
    choice: BodyValue,
    probs: BodyValue | None,
    rejecting: BodyValue,
    seed: BodyValue,
    first: BodyValue,
) -> list[BodyValue]:
    """Return the accepted length and the token after it, [batch] each.

    ``scores`` [batch, rows, vocab] are filtered. ``choice`` [batch, rows] is the token that requests without the
    rejection rule compare with; ``rejecting`` [batch] marks those with it. ``first`` [batch] is the position of row 0.
    """
    body, target, proposal = window.body, probabilities(scores), Proposal(window, probs)
    positions = first.expand_dims(-1) + body.arange(window.rows) * np.int64(REJECTION_STRIDE)
    coin = body.call("accept_coin", seed.expand_dims(-1), positions)
    kept = _kept(proposal, target)
    length = window.samplable_length()
    by_coin = _accepted(proposal, target, kept, coin, length)
    accepted = body.where(rejecting, by_coin, window.accepted(window.equals(choice)))

    mass = kept.at_rows(accepted).expand_dims(-1) * target.at_rows(accepted).cast(FLOAT64)
    surplus = mass - proposal.of_row(accepted).cast(FLOAT64)
    residual = body.op("Max", surplus.cast(FLOAT32), np.float32(0))
    bonus = accepted.equals(length)
    from_target = bonus.expand_dims(-1) | ~(residual.max_last() > np.float32(0))
    final_scores = body.where(from_target, scores.at_rows(accepted), residual.cast(FLOAT64).log().cast(FLOAT32))
    purpose = body.where(bonus, np.int64(Purpose.SAMPLE), np.int64(Purpose.RESIDUAL))
    noise = body.call("position_noise", seed, positions.at_rows(accepted), purpose, window.vocab)
    return [accepted, body.where(rejecting, (final_scores + noise).argmax_last(), choice.at_rows(accepted))]


def _kept(proposal: Proposal, target: BodyValue) -> BodyValue:
    """Return ``_kept`` of reference/verify.py, float64 [batch, rows]."""
    body, inside = proposal.body, proposal.tokens >= np.int64(0)
    p = body.where(inside, target.at_last(proposal.index).squeeze(-1), np.float32(0)).cast(FLOAT64)
    ratio = p / body.op("Max", proposal.of_token(), _LEAST_PROBABILITY)
    one = body.full(proposal.window.batch, np.float64(1))
    return body.scan_columns(one, ratio, lambda kept, ratio: body.op("Min", kept * ratio, np.float64(1)))


def _accepted(proposal: Proposal, target: BodyValue, kept: BodyValue, coin: BodyValue, length: BodyValue) -> BodyValue:
    """Return ``_accepted`` of reference/verify.py, int64 [batch]."""
    body, window = proposal.body, proposal.window
    mass = kept.expand_dims(-1) * target.cast(FLOAT64) - proposal.of_rows().cast(FLOAT64)
    surplus = body.op("Max", mass, np.float64(0)).sum_last().squeeze(-1)
    # The coin of row i - 1 decides whether i drafts are kept. Row 0 keeps none.
    column = body.full(body.concat(window.batch, np.array([1], np.int64), axis=0), np.float64(1))
    coins = body.concat(column, coin, axis=1).first(window.rows, 1)
    some = ~(kept < np.float64(1)) | (coins * (surplus + np.float64(1) - kept) < surplus)
    number, last = body.arange(window.rows), length.expand_dims(-1)
    stands = ((number < last) & some) | (number.equals(last) & (coins < kept))
    return body.op("ReduceMax", body.where(stands, number, np.int64(0)), np.array([-1], np.int64), keepdims=0)

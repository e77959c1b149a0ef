"""The rejection rule in standard operators: a uniform per drafted token, and one draw for the row after the accepted.

All tensors have window + 1 rows, the last without a draft, because onnxruntime cannot reduce a tensor without rows.
"""

import numpy as np

from tandemrt.plugins.functions.body import FLOAT32, FLOAT64, INT64, BodyValue
from tandemrt.plugins.functions.draft_window import NO_TOKEN, DraftWindow
from tandemrt.plugins.functions.filters import probabilities
from tandemrt.plugins.operators.constants import Purpose


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
        one_hot = self.tokens.at_rows(row).expand_dims(-1).equals(self.body.arange(self.window.vocab)).cast(FLOAT32)
        if self.probs is None:
            return one_hot
        drawn = self.drawn.cast(INT64).at_rows(row).expand_dims(-1) > np.int64(0)
        return self.body.where(drawn, self.probs.at_rows(row), one_hot)


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
    positions = first.expand_dims(-1) + body.arange(window.rows)
    coin = body.call("accept_coin", seed.expand_dims(-1), positions)
    p = target.at_last(proposal.index).squeeze(-1).cast(FLOAT64)
    token_accepted = (coin * proposal.of_token() < p).first(window.width, 1)
    by_coin = rejecting.expand_dims(-1)
    accepted = window.accepted((by_coin & token_accepted) | (~by_coin & window.equals(choice)))

    residual = body.op("Max", target.at_rows(accepted) - proposal.of_row(accepted), np.float32(0))
    bonus = accepted.equals(window.length)
    from_target = bonus.expand_dims(-1) | ~(residual.max_last() > np.float32(0))
    final_scores = body.where(from_target, scores.at_rows(accepted), residual.cast(FLOAT64).log().cast(FLOAT32))
    purpose = body.where(bonus, np.int64(Purpose.SAMPLE), np.int64(Purpose.RESIDUAL))
    noise = body.call("position_noise", seed, first + accepted, purpose, window.vocab)
    return [accepted, body.where(rejecting, (final_scores + noise).argmax_last(), choice.at_rows(accepted))]

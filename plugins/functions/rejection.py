"""The rejection rule in standard operators: a coin per drafted token, one draw for the row behind the run.

Everything has window + 1 rows, the last without a draft, because onnxruntime cannot reduce a tensor without rows.
"""

import numpy as np

from tandemrt.plugins.functions.body import FLOAT32, FLOAT64, INT64, Tensor
from tandemrt.plugins.functions.filters import law
from tandemrt.plugins.functions.window import NO_TOKEN, Window
from tandemrt.plugins.operators import Purpose


class Proposal:
    """The laws the drafts came from: ``probs`` [batch, K, vocab] where a row has any mass, else one-hot."""

    def __init__(self, window: Window, probs: Tensor | None) -> None:
        self.window = window
        self.body = body = window.body
        self.tokens = window.extended(body.where(window.in_vocab, window.draft, NO_TOKEN), NO_TOKEN)
        self.index = body.op("Max", self.tokens, np.int64(0)).expand_dims(-1)
        self.probs = None
        if probs is not None:
            last = body.full(body.concat(window.batch, np.array([1], np.int64), window.vocab, axis=0), np.float32(0))
            self.probs = body.concat(body.where(probs > np.float32(0), probs, np.float32(0)), last, axis=1)
            self.drawn = (self.tokens >= np.int64(0)) & (self.probs.max_last(keepdims=False) > np.float32(0))

    def of_token(self) -> Tensor:
        """q of each drafted token, float64 [batch, rows]."""
        if self.probs is None:
            return self.body.full(self.body.op("Shape", self.tokens), np.float64(1))
        q = self.probs.at_last(self.index).squeeze(-1)
        return self.body.where(self.drawn, q, np.float32(1)).cast(FLOAT64)

    def of_row(self, row: Tensor) -> Tensor:
        """q of every token at one row per request, float32 [batch, vocab]."""
        one_hot = self.tokens.at_rows(row).expand_dims(-1).equals(self.body.arange(self.window.vocab)).cast(FLOAT32)
        if self.probs is None:
            return one_hot
        drawn = self.drawn.cast(INT64).at_rows(row).expand_dims(-1) > np.int64(0)
        return self.body.where(drawn, self.probs.at_rows(row), one_hot)


def reject(
    window: Window, scores: Tensor, choice: Tensor, probs: Tensor | None, rejecting: Tensor, seed: Tensor, first: Tensor
) -> list[Tensor]:
    """The accepted length and the token behind it, [batch] each.

    ``scores`` [batch, rows, vocab] are filtered, ``choice`` [batch, rows] is what the requests that are not
    ``rejecting`` [batch] compare with, ``first`` [batch] is the position of row 0.
    """
    body, target, proposal = window.body, law(scores), Proposal(window, probs)
    positions = first.expand_dims(-1) + body.arange(window.rows)
    coin = body.call("accept_coin", seed.expand_dims(-1), positions)
    p = target.at_last(proposal.index).squeeze(-1).cast(FLOAT64)
    stands = (coin * proposal.of_token() < p).first(window.width, 1)
    by_coin = rejecting.expand_dims(-1)
    accepted = window.accepted((by_coin & stands) | (~by_coin & window.equals(choice)))

    residual = body.op("Max", target.at_rows(accepted) - proposal.of_row(accepted), np.float32(0))
    bonus = accepted.equals(window.length)
    from_target = bonus.expand_dims(-1) | ~(residual.max_last() > np.float32(0))
    final_scores = body.where(from_target, scores.at_rows(accepted), residual.cast(FLOAT64).log().cast(FLOAT32))
    purpose = body.where(bonus, np.int64(Purpose.SAMPLE), np.int64(Purpose.RESIDUAL))
    noise = body.call("position_noise", seed, first + accepted, purpose, window.vocab)
    return [accepted, body.where(rejecting, (final_scores + noise).argmax_last(), choice.at_rows(accepted))]

"""What both acceptance rules need of a window of drafted tokens."""

import numpy as np

from tandemrt.plugins.functions.body import FLOAT32, Body, Tensor

NO_TOKEN = np.int64(-1)


class Window:
    """Shapes, in brackets below, are of ``batch`` requests, ``K`` drafted tokens and ``rows`` = K + 1."""

    def __init__(self, body: Body, logits: Tensor, draft: Tensor, length: Tensor) -> None:
        self.body = body
        self.draft = draft  # int64 [batch, K]
        self.length = length  # int64 [batch]
        self.batch, self.rows, self.vocab = logits.size(0), logits.size(1), logits.size(2)  # int64 [1]
        self.width = draft.size(1)  # K
        self.alive = logits.max_last(keepdims=False) > np.float32(-np.inf)  # [batch, rows]: a token can be drawn
        self.in_vocab = (draft >= np.int64(0)) & (draft < self.vocab)  # [batch, K]
        drafted = body.arange(self.width) < length.expand_dims(-1)
        self._readable = self.in_vocab & self.alive.first(self.width, 1) & drafted

    def compare(self, choice: Tensor) -> list[Tensor]:
        """Accept while the draft equals ``choice`` [batch, rows]; the accepted length and the choice behind it."""
        accepted = self.accepted(self.equals(choice))
        return [accepted, choice.at_rows(accepted)]

    def equals(self, choice: Tensor) -> Tensor:
        return choice.first(self.width, 1).equals(self.draft)

    def accepted(self, stands: Tensor) -> Tensor:
        """The length of the accepted prefix, [batch]: the place of the first zero, and a zero behind the window."""
        flags = self.extended((self._readable & stands).cast(FLOAT32), np.float32(0))
        return self.body.op("ArgMin", flags, axis=-1, keepdims=0)

    def extended(self, values: Tensor, filler: np.generic) -> Tensor:
        """[batch, K] to [batch, rows], with ``filler`` for the row without a draft."""
        column = self.body.full(self.body.concat(self.batch, np.array([1], np.int64), axis=0), filler)
        return self.body.concat(values, column, axis=1)

    def written(self, accepted: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        """The accepted drafts, then ``final`` where its row can be drawn from, then −1; and how many tokens that is."""
        body, end = self.body, accepted.expand_dims(-1)
        emits = body.where(self.alive, np.int64(1), np.int64(0)).at_rows(accepted)
        last = body.where(emits > np.int64(0), final, NO_TOKEN).expand_dims(-1)
        place = body.arange(self.rows)
        tail = body.where(place.equals(end), last, NO_TOKEN)
        return body.where(place < end, self.extended(self.draft, NO_TOKEN), tail), accepted + emits

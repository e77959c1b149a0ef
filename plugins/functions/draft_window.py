"""Draft windows in standard operators: the part that both verification rules share."""

import numpy as np

from tandemrt.plugins.functions.body import FLOAT32, Body, BodyValue

NO_TOKEN = np.int64(-1)


class DraftWindow:
    """Drafted tokens and logits; shapes below use ``batch`` requests, ``K`` drafted tokens and ``rows`` = K + 1."""

    def __init__(self, body: Body, logits: BodyValue, draft: BodyValue, length: BodyValue) -> None:
        self.body = body
        self.draft = draft  # int64 [batch, K]
        self.length = length  # int64 [batch]
        self.batch, self.rows, self.vocab = logits.size(0), logits.size(1), logits.size(2)  # int64 [1]
        self.width = draft.size(1)  # K
        # [batch, rows]: some token can be sampled
        self.samplable = logits.max_last(keepdims=False) > np.float32(-np.inf)
        self.in_vocab = (draft >= np.int64(0)) & (draft < self.vocab)  # [batch, K]
        drafted = body.arange(self.width) < length.expand_dims(-1)
        self._readable = self.in_vocab & self.samplable.first(self.width, 1) & drafted

    def compare(self, choice: BodyValue) -> list[BodyValue]:
        """Accept while the draft equals ``choice`` [batch, rows]; return accepted length and next choice."""
        accepted = self.accepted(self.equals(choice))
        return [accepted, choice.at_rows(accepted)]

    def equals(self, choice: BodyValue) -> BodyValue:
        return choice.first(self.width, 1).equals(self.draft)

    def accepted(self, token_accepted: BodyValue) -> BodyValue:
        """Return the length of the accepted prefix, [batch], from the flags [batch, K] of single tokens."""
        flags = self.extended((self._readable & token_accepted).cast(FLOAT32), np.float32(0))
        return self.body.op("ArgMin", flags, axis=-1, keepdims=0)

    def extended(self, values: BodyValue, filler: np.generic) -> BodyValue:
        """Extend [batch, K] to [batch, rows], with ``filler`` for the row without a draft."""
        column = self.body.full(self.body.concat(self.batch, np.array([1], np.int64), axis=0), filler)
        return self.body.concat(values, column, axis=1)

    def written(self, accepted: BodyValue, final: BodyValue) -> tuple[BodyValue, BodyValue]:
        """Return the accepted drafts, then ``final`` if its row allows a draw, then −1; and the number of tokens."""
        body, end = self.body, accepted.expand_dims(-1)
        emits = body.where(self.samplable, np.int64(1), np.int64(0)).at_rows(accepted)
        last = body.where(emits > np.int64(0), final, NO_TOKEN).expand_dims(-1)
        place = body.arange(self.rows)
        tail = body.where(place.equals(end), last, NO_TOKEN)
        return body.where(place < end, self.extended(self.draft, NO_TOKEN), tail), accepted + emits

"""``sample_draft`` in standard operators."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body, Tensor
from tandemrt.plugins.functions.filters import filter_logits, finite_logits, law
from tandemrt.plugins.functions.noise import position_noise
from tandemrt.plugins.operators import Purpose, Rule


def sample_draft(draft_probs: bool) -> ir.Function:
    """(logits [batch, 1, vocab], temperature, top_k, top_p, min_p, seed, position, rule) → token[, draft_probs]."""
    body = Body.of("sample_draft")
    logits, temperature, top_k, top_p, min_p, seed, position, rule = body.inputs
    raw = finite_logits(body, logits)
    vocab = raw.size(-1)
    sampled = temperature > np.float32(0)
    alive = raw.max_last(keepdims=False).squeeze(1) > np.float32(-np.inf)
    greedy = body.where(alive, raw.argmax_last().squeeze(1), np.int64(-1))

    def one_hot(token: Tensor) -> Tensor:
        return token.expand_dims(-1).equals(body.arange(vocab)).cast(FLOAT32)

    def drawn() -> list[Tensor]:
        scores = body.call("filter_logits", raw, temperature, top_k, top_p, min_p)
        scores = scores.squeeze(1)
        rejecting = rule.equals(np.int64(Rule.REJECTION))
        purpose = body.where(rejecting, np.int64(Purpose.DRAFT), np.int64(Purpose.SAMPLE))
        noise = body.call("position_noise", seed, position, purpose, vocab)
        token = body.where(sampled & alive, (scores + noise).argmax_last(), greedy)
        if not draft_probs:
            return [token]
        from_law = (sampled & alive).expand_dims(-1)
        return [token, body.where(from_law, law(scores), one_hot(token))]

    results = body.branch(sampled.any(), drawn, lambda: [greedy, one_hot(greedy)] if draft_probs else [greedy])
    return body.function(**dict(zip(("token", "draft_probs"), results, strict=False)))


def bodies(dtype: str, given: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """See plugins/faces.py."""
    return sample_draft("draft_probs" in given), position_noise(), filter_logits()

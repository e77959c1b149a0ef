"""``sample_draft`` in standard operators."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, INT64, Body, BodyValue
from tandemrt.plugins.functions.filters import filter_logits, filtered, finite_logits, probabilities
from tandemrt.plugins.functions.noise import position_noise, token_noise
from tandemrt.plugins.operators.constants import Purpose, Rule


def sample_draft(draft_probs: bool, target_ids: bool = False) -> ir.Function:
    """(logits [batch, 1, vocab], temperature, …, rule[, target_ids]) → token[, draft_probs]."""
    body = Body.of("sample_draft", without=() if target_ids else ("target_ids",))
    seed, position, rule = body["seed"], body["position"], body["rule"]
    ids = body["target_ids"] if target_ids else None
    raw = finite_logits(body, body["logits"])
    vocab = raw.size(-1)
    sampled = body["temperature"] > np.float32(0)
    samplable = raw.max_last(keepdims=False).squeeze(1) > np.float32(-np.inf)
    greedy = body.where(samplable, raw.argmax_last().squeeze(1), np.int64(-1))

    def one_hot(column: BodyValue) -> BodyValue:
        return column.expand_dims(-1).equals(body.arange(vocab)).cast(FLOAT32)

    def drawn() -> list[BodyValue]:
        scores = filtered(body, raw).squeeze(1)
        rejecting = rule.equals(np.int64(Rule.REJECTION))
        purpose = body.where(rejecting, np.int64(Purpose.DRAFT), np.int64(Purpose.SAMPLE))
        if ids is not None:
            noise = body.call("token_noise", seed, position, purpose, ids)
        else:
            noise = body.call("position_noise", seed, position, purpose, vocab)
        column = body.where(sampled & samplable, (scores + noise).argmax_last(), greedy)
        if not draft_probs:
            return [column]
        from_distribution = (sampled & samplable).expand_dims(-1)
        return [column, body.where(from_distribution, probabilities(scores), one_hot(column))]

    column, *probs = body.branch(sampled.any(), drawn, lambda: [greedy, one_hot(greedy)] if draft_probs else [greedy])
    if ids is not None:
        column = body.where(samplable, body.op("Gather", ids, body.op("Max", column, np.int64(0))).cast(INT64), column)
    return body.function(token=column, **({"draft_probs": probs[0]} if probs else {}))


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    drawn = sample_draft("draft_probs" in present, "target_ids" in present)
    return drawn, position_noise(), token_noise(), filter_logits()

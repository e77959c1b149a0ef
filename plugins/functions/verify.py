"""``verify_draft`` in standard operators; see ``reference/verify.py`` for what is computed and why it is exact."""

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, FLOAT64, INT64, Body, Tensor
from tandemrt.plugins.functions.filters import finite_logits, law
from tandemrt.plugins.operators import Purpose, Rule

_NO_TOKEN = np.int64(-1)
_INPUTS = ["logits", "draft_tokens", "draft_len", "temperature", "top_k", "top_p", "min_p", "seed", "position", "rule"]


def verify_draft(draft_probs: bool) -> ir.Function:
    """(logits, draft_tokens, draft_len, temperature, …, rule[, draft_probs]) → tokens, count.

    A greedy batch runs neither sort nor noise, a coupled batch no softmax, a rejection batch draws noise for one row
    per request.
    """
    body = Body("verify_draft", [*_INPUTS, "draft_probs"] if draft_probs else _INPUTS)
    logits, draft, length, temperature, top_k, top_p, min_p, seed, position, rule = body.inputs[:10]
    probs = body.inputs[10] if draft_probs else None

    raw = finite_logits(body, logits)
    vocab, rows, window = raw.size(-1), raw.size(1), draft.size(1)
    batch = raw.size(0)
    alive = raw.max_last(keepdims=False) > np.float32(-np.inf)
    in_vocab = (draft >= np.int64(0)) & (draft < vocab)
    readable = in_vocab & alive.first(window, 1) & (body.arange(window) < length.expand_dims(-1))
    sampled = temperature > np.float32(0)
    rejecting = sampled & rule.equals(np.int64(Rule.REJECTION))
    greedy = raw.argmax_last()
    every_row = position.expand_dims(-1) + body.arange(rows)

    def column(value: np.generic) -> Tensor:
        return body.full(body.concat(batch, np.array([1], np.int64), axis=0), value)

    def run(stands: Tensor) -> Tensor:
        # The length of the accepted prefix is the place of the first zero; a zero behind the window ends it.
        flags = (readable & stands).cast(FLOAT32)
        flags = body.concat(flags, column(np.float32(0)), axis=1)
        return body.op("ArgMin", flags, axis=-1, keepdims=0)

    def compared(choice: Tensor) -> list[Tensor]:
        accepted = run(choice.first(window, 1).equals(draft))
        return [accepted, choice.at_rows(accepted)]

    def with_noise() -> list[Tensor]:
        scores = body.call("filter_logits", raw, temperature, top_k, top_p, min_p)

        def drawn() -> list[Tensor]:
            noise = body.call(
                "position_noise", seed.expand_dims(-1), every_row, np.array([[Purpose.SAMPLE]], np.int64), vocab
            )
            return [body.where(sampled.expand_dims(-1), (scores + noise).argmax_last(), greedy)]

        [choice] = body.branch((sampled & ~rejecting).any(), drawn, lambda: [greedy])
        return body.branch(rejecting.any(), lambda: rejection(scores, choice), lambda: compared(choice))

    def rejection(scores: Tensor, choice: Tensor) -> list[Tensor]:
        # All of it on window + 1 rows, the last without a draft: onnxruntime cannot reduce a tensor without rows.
        target = law(scores)
        tokens = body.concat(body.where(in_vocab, draft, _NO_TOKEN), column(_NO_TOKEN), axis=1)
        index = body.op("Max", tokens, np.int64(0)).expand_dims(-1)
        p = target.at_last(index).squeeze(-1).cast(FLOAT64)
        coin = body.call("accept_coin", seed.expand_dims(-1), every_row)
        if probs is not None:
            end = body.full(body.concat(batch, np.array([1], np.int64), vocab, axis=0), np.float32(0))
            laws = body.concat(body.where(probs > np.float32(0), probs, np.float32(0)), end, axis=1)
            drawn = (tokens >= np.int64(0)) & (laws.max_last(keepdims=False) > np.float32(0))
            q = body.where(drawn, laws.at_last(index).squeeze(-1), np.float32(1))
            coin = coin * q.cast(FLOAT64)
        stands = (coin < p).first(window, 1)
        equal = choice.first(window, 1).equals(draft)
        per_token = rejecting.expand_dims(-1)
        accepted = run((per_token & stands) | (~per_token & equal))

        proposed = tokens.at_rows(accepted).expand_dims(-1).equals(body.arange(vocab)).cast(FLOAT32)
        if probs is not None:
            from_law = drawn.cast(INT64).at_rows(accepted).expand_dims(-1) > np.int64(0)
            proposed = body.where(from_law, laws.at_rows(accepted), proposed)
        residual = body.op("Max", target.at_rows(accepted) - proposed, np.float32(0))
        bonus = accepted.equals(length)
        from_target = bonus.expand_dims(-1) | ~(residual.max_last() > np.float32(0))
        final_scores = body.where(from_target, scores.at_rows(accepted), residual.cast(FLOAT64).log().cast(FLOAT32))
        purpose = body.where(bonus, np.int64(Purpose.SAMPLE), np.int64(Purpose.RESIDUAL))
        noise = body.call("position_noise", seed, position + accepted, purpose, vocab)
        final = body.where(rejecting, (final_scores + noise).argmax_last(), choice.at_rows(accepted))
        return [accepted, final]

    accepted, final = body.branch(sampled.any(), with_noise, lambda: compared(greedy))
    emits = alive.cast(INT64).at_rows(accepted)
    last = body.where(emits > np.int64(0), final, _NO_TOKEN).expand_dims(-1)
    place, end = body.arange(rows), accepted.expand_dims(-1)
    tail = body.where(place.equals(end), last, _NO_TOKEN)
    tokens = body.where(place < end, body.concat(draft, column(_NO_TOKEN), axis=1), tail)
    return body.function(tokens=tokens, count=accepted + emits)

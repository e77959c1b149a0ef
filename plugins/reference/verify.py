"""``verify_draft``: accept a prefix of each request's draft tokens and choose the token after it.

Each request uses one of two rules. *Coupled* draws every row from the target with position-keyed noise and accepts
while the draw equals the draft, so the emitted tokens never depend on the draft. *Rejection* is speculative sampling
(Leviathan, Kalman and Matias, "Fast inference from transformers via speculative decoding", ICML 2023).

Rejection uses independent random streams. A drafted position uses the draft's own draw (DRAFT), the acceptance test
(ACCEPT) and the residual (RESIDUAL). Any other position uses one draw from the target (SAMPLE). No decision at an
earlier position reads these streams at this position. Each token therefore has the target's distribution given its
prefix, however the positions are split into draft windows. There is one condition: the end of the window must not
depend on the token that would have been drafted next. The caller therefore never cuts the window before a draft token
that the mask forbids. It passes the token on; the rejection rule rejects it and draws from the residual.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.constants import Purpose, Rule
from tandemrt.plugins.reference.arguments import sampling_vectors
from tandemrt.plugins.reference.filters import filter_logits, finite_logits, probabilities
from tandemrt.plugins.reference.noise import accept_coin, position_noise


def verify_draft(
    logits: npt.ArrayLike,
    draft_tokens: npt.ArrayLike,
    draft_len: npt.ArrayLike,
    *,
    draft_probs: npt.ArrayLike | None = None,
    **sampling: Any,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the emitted tokens, int64 [batch, K+1] padded with −1, and their number, int64 [batch].

    ``logits`` floating [batch, K+1, vocab] are final: biased, penalized and masked. ``draft_tokens`` is int64 [batch,
    K]; the first ``draft_len`` (int64 [batch]) of a row were drafted, and rows of logits after them are not read.
    ``sampling``: the parameters of engines/contract/sampling_parameters.py, per-request vectors or scalars. Temperature
    0 is greedy under either rule. A filter that is 0, None or omitted keeps every token, and so does ``top_p`` 1.

    ``draft_probs`` float32 [batch, K, vocab] are the distributions that the drafts were drawn from. An all-zero row, or
    no array, means that the token was chosen without a draw (one-hot). Only the rejection rule reads them.

    A token whose logit is not finite cannot be drawn. The accepted run ends at a row without any finite logit, and that
    row emits nothing. A drafted id outside the vocabulary is never accepted. Raises ValueError for arguments out of
    range or of the wrong shape.
    """
    raw = finite_logits(np.asarray(logits))
    batch, rows, vocab = raw.shape
    window = rows - 1
    draft = np.asarray(draft_tokens, dtype=np.int64)
    length = np.asarray(draft_len, dtype=np.int64)
    _check_draft(draft, length, batch, window)
    vectors = sampling_vectors(batch, **sampling)
    seed, position = vectors["seed"], vectors["position"]
    sampled = vectors["temperature"] > 0
    rejection = sampled & (vectors["rule"] == Rule.REJECTION)
    positions = position[:, None] + np.arange(rows)
    seeds = seed[:, None]

    scores = filter_logits(raw, vectors)
    drawn = np.argmax(scores + position_noise(seeds, positions, Purpose.SAMPLE, vocab), axis=-1)
    choice = np.where(sampled[:, None], drawn, np.argmax(raw, axis=-1))

    target = probabilities(scores)
    proposed = _proposed(draft, draft_probs, vocab)
    in_vocab = (draft >= 0) & (draft < vocab)
    p, q = (_of_token(probs, np.where(in_vocab, draft, 0)) for probs in (target[:, :window], proposed))
    coin = accept_coin(seeds, positions[:, :window])
    token_accepted = np.where(rejection[:, None], coin * q < p, choice[:, :window] == draft)

    samplable = np.isfinite(raw).any(axis=-1)
    in_run = token_accepted & in_vocab & samplable[:, :window] & (np.arange(window) < length[:, None])
    accepted = np.cumprod(in_run, axis=-1, dtype=np.int64).sum(axis=-1)

    # The row after the accepted drafts: a bonus token if all were accepted, else a replacement.
    every = np.arange(batch)
    padded = np.concatenate((proposed, np.zeros((batch, 1, vocab), np.float32)), axis=1)
    residual = np.maximum(target[every, accepted] - padded[every, accepted], 0)
    empty = ~(residual > 0).any(axis=-1)
    with np.errstate(divide="ignore"):
        replaced = np.log(residual, dtype=np.float64).astype(np.float32)
    bonus = accepted == length
    final_scores = np.where((bonus | empty)[:, None], scores[every, accepted], replaced)
    purpose = np.where(bonus, Purpose.SAMPLE, Purpose.RESIDUAL)
    noise = position_noise(seed, position + accepted, purpose, vocab)
    final = np.where(rejection, np.argmax(final_scores + noise, axis=-1), choice[every, accepted])

    count = accepted + samplable[every, accepted]
    tokens = np.full((batch, rows), -1, dtype=np.int64)
    tokens[:, :window] = np.where(np.arange(window) < accepted[:, None], draft, -1)
    tokens[every, accepted] = np.where(samplable[every, accepted], final, -1)
    return tokens, count.astype(np.int64)


def _proposed(draft: np.ndarray, draft_probs: npt.ArrayLike | None, vocab: int) -> np.ndarray:
    # The distribution of each draft. The row of an id outside the vocabulary is all zero.
    one_hot: np.ndarray = np.equal(draft[..., None], np.arange(vocab)).astype(np.float32)
    if draft_probs is None:
        return one_hot
    probs = np.asarray(draft_probs, dtype=np.float32)
    if probs.shape != one_hot.shape:
        raise ValueError(f"draft_probs: shape [batch, K, vocab] = {one_hot.shape} is needed, got {probs.shape}")
    probs = np.where(probs > 0, probs, np.float32(0))
    drawn = probs.any(axis=-1, keepdims=True) & one_hot.any(axis=-1, keepdims=True)
    return np.where(drawn, probs, one_hot)


def _of_token(probs: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    picked: np.ndarray = np.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0]
    return picked


def _check_draft(draft: np.ndarray, length: np.ndarray, batch: int, window: int) -> None:
    if draft.shape != (batch, window):
        raise ValueError(f"draft_tokens: one column less than rows of logits, {(batch, window)}, got {draft.shape}")
    if length.shape != (batch,) or not ((length >= 0) & (length <= window)).all():
        raise ValueError(f"draft_len: one value between 0 and {window} per request is needed, got {length}")

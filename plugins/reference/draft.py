"""``sample_draft``: draw one drafted token per request, and say from which law."""

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators import Purpose, Rule
from tandemrt.plugins.reference.arguments import RuleLike, Sampling
from tandemrt.plugins.reference.filters import filter_logits, finite_logits, law
from tandemrt.plugins.reference.noise import position_noise


def sample_draft(
    logits: npt.ArrayLike,
    *,
    temperature: npt.ArrayLike | None,
    top_k: npt.ArrayLike | None,
    top_p: npt.ArrayLike | None,
    min_p: npt.ArrayLike | None,
    seed: npt.ArrayLike,
    position: npt.ArrayLike,
    rule: RuleLike,
    target_ids: npt.ArrayLike | None = None,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return one token per request, int64 [batch], and the law it was drawn from, float32 [batch, vocab].

    ``logits`` floating [batch, vocab] or [batch, 1, vocab] are the draft's, for the token at index ``position``. The
    *coupled* rule draws with the noise that the target will use there; *rejection* has a stream of its own (DRAFT),
    because a draft that shares noise with the coin or the residual biases the text. Temperature 0 takes the largest
    logit, and its law is one-hot. A row without any finite logit gives token −1 and a law of zeros.

    Of a draft that knows a part of its target's tokens ``vocab`` is that part, the law's too. ``target_ids`` integer
    [vocab] are the target's ids of its tokens, ascending: the noise is theirs, and so is the token that is returned.
    """
    raw = finite_logits(np.asarray(logits))
    raw = raw.reshape(raw.shape[0], 1, raw.shape[-1])
    batch, _, vocab = raw.shape
    sampling = Sampling.of(
        batch, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, position=position, rule=rule
    )
    purpose = np.where(sampling.rule == Rule.REJECTION, Purpose.DRAFT, Purpose.SAMPLE)
    ids = np.arange(vocab) if target_ids is None else np.asarray(target_ids)
    scores = filter_logits(raw, sampling)[:, 0]
    noise = position_noise(sampling.seed, sampling.position, purpose, int(ids[-1]) + 1)[:, ids]
    drawn = np.argmax(scores + noise, axis=-1)
    sampled = sampling.temperature > 0
    column = np.where(sampled, drawn, np.argmax(raw[:, 0], axis=-1))
    token = np.where(np.isfinite(raw).any(axis=(1, 2)), ids[column], -1).astype(np.int64)
    one_hot = (token[:, None] == ids).astype(np.float32)
    return token, np.where(sampled[:, None], law(scores), one_hot)

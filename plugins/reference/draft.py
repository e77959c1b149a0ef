"""``sample_draft``: draw one draft token per request, and return its distribution."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.constants import Purpose, Rule
from tandemrt.plugins.reference.arguments import sampling_vectors
from tandemrt.plugins.reference.filters import filter_logits, finite_logits, probabilities
from tandemrt.plugins.reference.noise import position_noise


def sample_draft(
    logits: npt.ArrayLike,
    *,
    target_ids: npt.ArrayLike | None = None,
    **sampling: Any,
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Return one token per request, int64 [batch], and its distribution, float32 [batch, vocab].

    ``logits`` floating [batch, vocab] or [batch, 1, vocab] are the draft's, for the token at index ``position``.
    ``sampling``: see ``verify_draft``.

    The coupled rule uses the noise that the target will use at this position. The rejection rule uses a stream of its
    own (DRAFT), because noise shared with the acceptance test or the residual would bias the text. Temperature 0 takes
    the largest logit, with a one-hot distribution. A row without finite logits gives token −1 and zero probabilities.

    A draft may support only a part of its target's tokens: ``vocab`` is then the size of that part, in the distribution
    too. ``target_ids`` integer [vocab] are the target's ids of these tokens, ascending. The noise uses these ids, and
    the returned token is one of them.
    """
    raw = finite_logits(np.asarray(logits))
    raw = raw.reshape(raw.shape[0], 1, raw.shape[-1])
    batch, _, vocab = raw.shape
    vectors = sampling_vectors(batch, **sampling)
    purpose = np.where(vectors["rule"] == Rule.REJECTION, Purpose.DRAFT, Purpose.SAMPLE)
    ids = np.arange(vocab) if target_ids is None else np.asarray(target_ids)
    scores = filter_logits(raw, vectors)[:, 0]
    noise = position_noise(vectors["seed"], vectors["position"], purpose, int(ids[-1]) + 1)[:, ids]
    drawn = np.argmax(scores + noise, axis=-1)
    sampled = vectors["temperature"] > 0
    column = np.where(sampled, drawn, np.argmax(raw[:, 0], axis=-1))
    token = np.where(np.isfinite(raw).any(axis=(1, 2)), ids[column], -1).astype(np.int64)
    one_hot = (token[:, None] == ids).astype(np.float32)
    return token, np.where(sampled[:, None], probabilities(scores), one_hot)

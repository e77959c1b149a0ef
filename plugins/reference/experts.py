"""``experts``: a mixture of experts in place of a feed-forward block."""

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.reference.swiglu import swiglu


def experts(
    x: npt.ArrayLike,
    router_logits: npt.ArrayLike,
    gate_up: npt.ArrayLike,
    down: npt.ArrayLike,
    *,
    per_token: int,
    normalized: int,
) -> np.ndarray:
    """Return what each token's experts give it, floating [..., hidden], of ``x`` [..., hidden].

    A token chooses the ``per_token`` experts of its largest ``router_logits`` [..., experts], of equal ones the first,
    and a NaN last; each counts by its softmax over the logits of all experts, or with ``normalized`` over those that
    were chosen. Expert e gives silu(gate) * up of its part of ``gate_up`` [experts * 2 * width, hidden], gates first,
    times its part of ``down`` [experts * hidden, width] (Fedus et al., "Switch Transformers", 2021; Jiang et al.,
    "Mixtral of Experts", 2024).

    Computed in float64; the activation and the result are rounded to the dtype of ``x`` once each.
    """
    given, logits = np.asarray(x), np.asarray(router_logits).astype(np.float64)
    hidden, count = given.shape[-1], logits.shape[-1]
    wide = np.asarray(gate_up).astype(np.float64).reshape(count, -1, hidden)
    narrow = np.asarray(down).astype(np.float64).reshape(count, hidden, -1)
    rows = given.astype(np.float64).reshape(-1, hidden)
    mixed = np.zeros_like(rows)
    for row, scores, to in zip(rows, logits.reshape(-1, count), mixed, strict=True):
        chosen = np.argsort(-scores, kind="stable")[:per_token]
        powers = np.exp(scores - scores.max())
        shares = powers / (powers[chosen] if normalized else powers).sum()
        for expert in chosen:
            activated = swiglu(wide[expert] @ row).astype(given.dtype).astype(np.float64)
            to += shares[expert] * (narrow[expert] @ activated)
    return mixed.astype(given.dtype).reshape(given.shape)

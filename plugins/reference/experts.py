"""``experts``: a mixture of experts in place of an MLP."""

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.reference.swiglu import swiglu


def experts(
    x: npt.ArrayLike,
    router_logits: npt.ArrayLike,
    gate_up: npt.ArrayLike,
    down: npt.ArrayLike,
    prompt_rows: npt.ArrayLike | None = None,  # noqa: ARG001
    *,
    per_token: int,
    normalized: int,
) -> np.ndarray:
    """Return the mixture of the experts' outputs per token, floating [..., hidden], for ``x`` [..., hidden].

    A token selects the ``per_token`` experts with the largest ``router_logits`` [..., experts]; ties go to the lower
    index, and NaN ranks last. The weight of an expert is its softmax over the logits of all experts, or with
    ``normalized`` over the selected ones. Expert e computes silu(gate) * up from its part of ``gate_up``
    [experts * 2 * width, hidden], gates first, times its part of ``down`` [experts * hidden, width] (Fedus et al.,
    "Switch Transformers", 2021; Jiang et al., "Mixtral of Experts", 2024).

    ``prompt_rows`` [prompt tokens]: as many rows, the last ones, are those of prompts, which only changes rounding.
    Computed in float64; the activation and the result are rounded to the dtype of ``x`` once each.
    """
    hidden_states, logits = np.asarray(x), np.asarray(router_logits).astype(np.float64)
    hidden, count = hidden_states.shape[-1], logits.shape[-1]
    gate_up_weights = np.asarray(gate_up).astype(np.float64).reshape(count, -1, hidden)
    down_weights = np.asarray(down).astype(np.float64).reshape(count, hidden, -1)
    rows = hidden_states.astype(np.float64).reshape(-1, hidden)
    mixed = np.zeros_like(rows)
    for row, scores, to in zip(rows, logits.reshape(-1, count), mixed, strict=True):
        chosen = np.argsort(-scores, kind="stable")[:per_token]
        powers = np.exp(scores - scores.max())
        routing_weights = powers / (powers[chosen] if normalized else powers).sum()
        for expert in chosen:
            activated = swiglu(gate_up_weights[expert] @ row).astype(hidden_states.dtype).astype(np.float64)
            to += routing_weights[expert] * (down_weights[expert] @ activated)
    return mixed.astype(hidden_states.dtype).reshape(hidden_states.shape)

"""``experts``: a mixture of experts in place of an MLP."""

import numpy as np
import numpy.typing as npt


def experts(
    x: npt.ArrayLike,
    router_logits: npt.ArrayLike,
    gate_up: npt.ArrayLike,
    down: npt.ArrayLike,
    gate_up_bias: npt.ArrayLike | None = None,
    down_bias: npt.ArrayLike | None = None,
    expert_factors: npt.ArrayLike | None = None,
    prompt_rows: npt.ArrayLike | None = None,  # noqa: ARG001
    *,
    per_token: int,
    normalized: int,
    shared_columns: int = 0,
    interleaved: int = 0,
    alpha: float = 1.0,
    cubic: float = 0.0,
    limit: float = 0.0,
    offset: float = 0.0,
) -> np.ndarray:
    """Return the mixture of the experts' outputs per token, floating [..., hidden], for ``x`` [..., hidden].

    A token selects the ``per_token`` experts with the largest ``router_logits`` [..., experts]; ties go to the lower
    index, and NaN ranks last. The weight of an expert is its softmax over the logits of all experts, or with
    ``normalized`` over the selected ones, times its number in ``expert_factors`` [experts]. If there are
    ``shared_columns`` after the logits of the experts, every token selects one more expert, whose weights are the last;
    its weight is the sigmoid of the first of these columns, and the others have no meaning. Expert e computes gates and
    ups from its part of ``gate_up`` [experts * 2 * width, hidden], gates first, or by turns if ``interleaved``, then
    (up + ``offset``) * gate * sigmoid(``alpha`` * gate + ``cubic`` * gate³), times its part of ``down``
    [experts * hidden, width] (Fedus et al., "Switch Transformers", 2021; Jiang et al., "Mixtral of Experts", 2024).
    The defaults are silu; ``ACTIVATIONS`` has others. A ``limit`` bounds gates from above and ups on both sides. Both
    products get the biases ``gate_up_bias`` and ``down_bias``, one per row of the weight.

    ``prompt_rows`` [prompt tokens]: as many rows, the last ones, are those of prompts, which only changes rounding.
    Computed in float64; the activation and the result are rounded to the dtype of ``x`` once each.
    """
    hidden_states, logits = np.asarray(x), np.asarray(router_logits).astype(np.float64)
    hidden, routed = hidden_states.shape[-1], logits.shape[-1] - shared_columns
    count = routed + bool(shared_columns)
    gate_up_weights = np.asarray(gate_up).astype(np.float64).reshape(count, -1, hidden)
    down_weights = np.asarray(down).astype(np.float64).reshape(count, hidden, -1)
    gate_up_biases, down_biases = (
        np.zeros(weights.shape[:2]) if bias is None else np.asarray(bias).astype(np.float64).reshape(weights.shape[:2])
        for bias, weights in ((gate_up_bias, gate_up_weights), (down_bias, down_weights))
    )
    factors = np.ones(routed) if expert_factors is None else np.asarray(expert_factors).astype(np.float64)
    rows = hidden_states.astype(np.float64).reshape(-1, hidden)
    mixed = np.zeros_like(rows)
    for row, columns, to in zip(rows, logits.reshape(-1, routed + shared_columns), mixed, strict=True):
        scores, gates = columns[:routed], columns[routed:][: count - routed]
        chosen = np.argsort(-scores, kind="stable")[:per_token]
        powers = np.exp(scores - scores.max())
        of_routed = powers / (powers[chosen] if normalized else powers).sum() * factors
        routing_weights = np.append(of_routed, 1 / (1 + np.exp(-gates)))
        for expert in (*chosen, *range(routed, count)):
            both = gate_up_weights[expert] @ row + gate_up_biases[expert]
            gate, up = (both[::2], both[1::2]) if interleaved else np.split(both, 2)
            if limit:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            with np.errstate(over="ignore"):  # a very negative gate, whose result is correctly 0
                glu = gate / (1 + np.exp(-gate * (alpha + cubic * gate * gate)))
            activated = ((up + offset) * glu).astype(hidden_states.dtype).astype(np.float64)
            outputs = down_weights[expert] @ activated + down_biases[expert]
            to += routing_weights[expert] * outputs
    return mixed.astype(hidden_states.dtype).reshape(hidden_states.shape)

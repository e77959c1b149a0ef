"""``q4_k_matmul`` and ``q6_k_matmul``: matmuls with weights of GGUF's types K."""

from functools import partial

import numpy as np

from tandemrt.plugins.operators.k_quants_layout import BLOCK, K_QUANTS

_MIDDLE = 128  # the zero point of q6_k


def _matmul(
    kind: str,
    x: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    factors: np.ndarray,
    prompt_rows: np.ndarray | None = None,  # noqa: ARG001
) -> np.ndarray:
    """Return x @ w.T, rounded once to the dtype of ``x`` [..., inner]; ``inner`` is a multiple of 256.

    ``weight`` uint8 [width, bytes] holds the integers, of 4 bits for q4_k and of 8 for q6_k, in the order of
    plugins/operators/k_quants_layout.py. ``scales`` int8 [width, inner / 16] are, for each 128 inputs, four scales and
    four minima, for q6_k eight scales. ``factors`` float16 [width, inner / 128] are, for each 256 inputs, that of the
    scales and that of the minima, for q6_k [width, inner / 256] that of the scales. ``prompt_rows`` as for int4_matmul.
    """
    out: np.ndarray = x.astype(np.float64) @ k_values(kind, weight, scales, factors).T
    return out.astype(x.dtype)


def k_values(kind: str, weight: np.ndarray, scales: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Return the values of a weight, float64 [width, inner]."""
    quant, width = K_QUANTS[kind], len(weight)
    integers = quant.integers(weight).reshape(width, -1, quant.group).astype(np.float64)
    of_groups = scales.reshape(width, -1, 2, 4).astype(np.float64)
    of_blocks = factors.astype(np.float64).reshape(width, -1, 2 if quant.minima else 1)
    repeated = of_blocks.repeat(BLOCK // quant.group, axis=1)
    if not quant.minima:
        values: np.ndarray = (integers - _MIDDLE) * (of_groups.reshape(width, -1) * repeated[:, :, 0])[:, :, None]
        return values.reshape(width, -1)
    multiplied, subtracted = (of_groups[:, :, at].reshape(width, -1) * repeated[:, :, at] for at in (0, 1))
    values = integers * multiplied[:, :, None] - subtracted[:, :, None]
    return values.reshape(width, -1)


q4_k_matmul, q6_k_matmul = (partial(_matmul, kind) for kind in K_QUANTS)

"""``float4_matmul``: a matmul with a weight of 4-bit floats (plugins/operators/float4.py)."""

import numpy as np

from tandemrt.plugins.operators.float4 import VALUES, floats_from_tiles
from tandemrt.plugins.operators.float8 import FLOAT8


def float4_matmul(
    x: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    factors: np.ndarray,
    prompt_rows: np.ndarray | None = None,  # noqa: ARG001
    *,
    group_size: int,
) -> np.ndarray:
    """Return x @ w.T, rounded once to the dtype of ``x`` [..., inner], for w = float * scale * factor.

    ``weight`` uint8 [width, padded / 2] holds the codes of 4-bit floats in the order of floats_in_tiles, padded after
    ``inner`` to a multiple of 128. ``scales`` uint8 [width, groups] are the bytes of float8_e4m3fn, one per
    ``group_size`` inputs (16 or 32); scales_of_output gives ``groups``. ``factors`` float32 [width], one per output.
    ``prompt_rows`` as for int4_matmul.
    """
    numbers = float4_values(weight, scales, factors, group_size)
    out: np.ndarray = x.astype(np.float64) @ numbers[:, : x.shape[-1]].T
    return out.astype(x.dtype)


def float4_values(weight: np.ndarray, scales: np.ndarray, factors: np.ndarray, group_size: int) -> np.ndarray:
    """Return the values of a weight, float64 [width, padded]."""
    width, groups = len(scales), weight.shape[1] * 2 // group_size
    floats = VALUES[floats_from_tiles(weight)].reshape(width, groups, group_size).astype(np.float64)
    scaled = floats * scales.view(FLOAT8).astype(np.float64)[:, :groups, None]
    values: np.ndarray = scaled.reshape(width, -1) * factors.astype(np.float64)[:, None]
    return values

"""``int8_matmul``: a matmul with a weight of 8-bit integers (plugins/operators/int8_layout.py)."""

import numpy as np

from tandemrt.plugins.operators.int8_layout import bytes_from_tiles

_ZERO = 128  # the zero point


def int8_matmul(
    x: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    prompt_rows: np.ndarray | None = None,  # noqa: ARG001
    *,
    group_size: int,
) -> np.ndarray:
    """Return x @ w.T, rounded once to the dtype of ``x`` [..., inner], for w = (integer - 128) * scale.

    ``weight`` uint8 [width, padded] holds the integers in the order of bytes_in_tiles, padded after ``inner`` to a
    multiple of 128. ``scales`` [width, groups] have the dtype of ``x``, one per ``group_size`` inputs (32, 64 or 128);
    scales_of_output gives ``groups``. ``prompt_rows`` as for int4_matmul.
    """
    numbers = int8_values(weight, scales, group_size)
    out: np.ndarray = x.astype(np.float64) @ numbers[:, : x.shape[-1]].T
    return out.astype(x.dtype)


def int8_values(weight: np.ndarray, scales: np.ndarray, group_size: int) -> np.ndarray:
    """Return the values of a weight, float64 [width, padded]."""
    width, groups = len(scales), weight.shape[1] // group_size
    integers = bytes_from_tiles(weight).reshape(width, groups, group_size).astype(np.float64)
    values: np.ndarray = ((integers - _ZERO) * scales.astype(np.float64)[:, :groups, None]).reshape(width, -1)
    return values

"""``int4_matmul``: a matmul with a weight of 4-bit integers (plugins/operators/int4_layout.py)."""

import numpy as np

from tandemrt.plugins.operators.int4_layout import from_tiles, unpacked

_MIDDLE = 8  # the zero point of a weight that stores none


def int4_matmul(
    x: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None = None,
    prompt_rows: np.ndarray | None = None,  # noqa: ARG001
    *,
    group_size: int,
) -> np.ndarray:
    """Return x @ w.T, rounded once to the dtype of ``x`` [..., inner], for w = (integer - zero point) * scale.

    ``weight`` uint8 [width, padded / 2] holds the integers in the order of in_tiles, padded after ``inner`` to a
    multiple of 128. ``scales`` [width, groups] have the dtype of ``x``, one per ``group_size`` inputs (32, 64 or 128);
    scales_of_output gives ``groups``. ``zeros`` uint8 [width, groups / 2] are the zero points, two per byte, the first
    in the low half; without them every zero point is 8. ``prompt_rows`` [prompt tokens]: as many rows, the last ones,
    are those of prompts, which only changes rounding.
    """
    numbers = int4_values(weight, scales, zeros, group_size=group_size)
    out: np.ndarray = x.astype(np.float64) @ numbers[:, : x.shape[-1]].T
    return out.astype(x.dtype)


def int4_values(
    weight: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None, *, group_size: int
) -> np.ndarray:
    """Return the values of a weight, float64 [width, padded]."""
    width, groups = len(scales), weight.shape[1] * 2 // group_size
    integers = from_tiles(weight).reshape(width, groups, group_size).astype(np.float64)
    middles = np.float64(_MIDDLE) if zeros is None else unpacked(zeros)[:, :groups, None].astype(np.float64)
    values: np.ndarray = ((integers - middles) * scales.astype(np.float64)[:, :groups, None]).reshape(width, -1)
    return values

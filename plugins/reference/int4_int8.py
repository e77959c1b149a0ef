"""``int4_int8_matmul``: inputs rounded to 8 bits times 4-bit weights (plugins/operators/int4_interleaved.py)."""

import numpy as np

from tandemrt.plugins.operators.int4_interleaved import STEP, TINY, by_output, deinterleaved

_MIDDLE = 8  # the zero point of a weight that stores none


def int4_int8_matmul(
    x: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None = None,
    *,
    group_size: int,
    width: int,
) -> np.ndarray:
    """Return rounded(x) @ w.T, float32 [..., width], for w = (integer - zero point) * scale and ``x`` [..., inner].

    ``weight`` holds the integers in the order of ``interleaved``. ``scales`` float32 and ``zeros`` uint8 are in the
    order of ``by_tile``, one value per ``group_size`` inputs (a multiple of 32). Without ``zeros`` every zero point is
    8.
    """
    middles = np.float64(_MIDDLE) if zeros is None else _each_input(zeros, group_size, weight)
    numbers = (deinterleaved(weight) - middles) * _each_input(scales, group_size, weight)
    out: np.ndarray = rounded(x, numbers.shape[1]) @ numbers[:width].T
    return out.astype(np.float32)


def rounded(x: np.ndarray, inner: int) -> np.ndarray:
    """Return ``x``, padded to ``inner``, as an 8-bit integer times a scale per 32 inputs, in float64.

    A step with an input that is not finite becomes NaN.
    """
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, inner - x.shape[-1])])
    steps = padded.reshape(*x.shape[:-1], -1, STEP)
    finite = np.isfinite(steps).all(-1, keepdims=True)
    steps = np.where(finite, steps, np.float32(0))
    largest = np.abs(steps).max(-1, keepdims=True)
    inverse = np.where(largest > TINY, np.float32(127) / np.maximum(largest, TINY), np.float32(0))
    scale = np.where(inverse > 0, largest / np.float32(127), np.float32(0))
    values = np.rint(steps * inverse).astype(np.float64) * np.where(finite, scale, np.nan)
    out: np.ndarray = values.reshape(padded.shape)
    return out


def _each_input(values: np.ndarray, group_size: int, weight: np.ndarray) -> np.ndarray:
    inner = deinterleaved(weight[:1]).shape[1]
    each: np.ndarray = np.repeat(by_output(values).astype(np.float64), group_size, axis=1)[:, :inner]
    return each

"""``low_bit_int8_matmul``: inputs in 8 bits times weights of 4 to 8 bits (plugins/operators/low_bit_interleaved.py)."""

import numpy as np

from tandemrt.plugins.operators.low_bit_interleaved import STEP, TINY, by_output, deinterleaved


def low_bit_int8_matmul(
    x: np.ndarray,
    weight: np.ndarray,
    scales: np.ndarray,
    zeros: np.ndarray | None = None,
    offsets: np.ndarray | None = None,
    subscales: np.ndarray | None = None,
    suboffsets: np.ndarray | None = None,
    table: np.ndarray | None = None,
    *,
    bits: int,
    group_size: int,
    width: int,
) -> np.ndarray:
    """Return rounded(x) @ w.T, float32 [..., width], for ``x`` [..., inner] and the first ``width`` outputs of w.

    w = (integer - zero point) * scale, or integer * scale + offset. ``weight`` holds the integers, of ``bits`` bits, in
    the order of ``interleaved``. The other inputs are in the order of ``by_tile``, with one value per ``group_size``
    inputs: a multiple of 32, or of 16 with 6 bits. Without ``zeros`` (uint8) and ``offsets`` every zero point is the
    middle of the range. ``scales`` and ``offsets`` are float32. With ``subscales`` (int8) they may have a value for
    several groups, and the scale of a group is ``scales`` * ``subscales``; so are offsets with ``suboffsets`` (int8).
    With ``table`` (uint8 [16]) integers of 4 bits choose among its integers, whose zero point is 128.
    """
    stored = deinterleaved(weight, bits)
    integers = (stored if table is None else table[stored]).astype(np.float64)
    inner = integers.shape[1]

    def each_input(values: np.ndarray) -> np.ndarray:
        return np.repeat(values, group_size, axis=1)[:, :inner]

    scale = each_input(_products(scales, subscales))
    if offsets is not None:
        numbers = integers * scale + each_input(_products(offsets, suboffsets))
    else:
        middle = 1 << (bits - 1) if table is None else 128
        middles = np.float64(middle) if zeros is None else each_input(by_output(zeros))
        numbers = (integers - middles) * scale
    out: np.ndarray = rounded(x, inner) @ numbers[:width].T
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


def _products(values: np.ndarray, subvalues: np.ndarray | None) -> np.ndarray:
    """Return the value of each output and group in float64: the product of both inputs, or the first."""
    each = by_output(values).astype(np.float64)
    if subvalues is None:
        return each
    factors = by_output(subvalues)
    products: np.ndarray = each.repeat(factors.shape[1] // each.shape[1], axis=1) * factors
    return products

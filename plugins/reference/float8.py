"""Matmuls in float8_e4m3fn: quantization, and matmuls with scales and without."""

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.float8 import FLOAT8, FLOAT8_MAX, MIN_SCALE


def quantize_tokens(x: npt.ArrayLike, static_scale: npt.ArrayLike | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return ``x`` [..., inner] divided by its scales, in float8_e4m3fn, and the scales, float32 [..., 1].

    A token's scale maps its largest value to the largest of float8. ``static_scale`` [1] replaces it if the checkpoint
    stores one scale for all tokens; values out of range are then clamped. Tokens are independent of each other.
    """
    wide = np.asarray(x).astype(np.float32)
    if static_scale is None:
        scales = np.maximum(np.abs(wide).max(-1, keepdims=True) / np.float32(FLOAT8_MAX), np.float32(MIN_SCALE))
    else:
        scales = np.full((*wide.shape[:-1], 1), static_scale, np.float32)
    bounded = np.clip(wide / scales, -FLOAT8_MAX, FLOAT8_MAX)
    return bounded.astype(FLOAT8), scales


def float8_matmul(quantized: np.ndarray, weight: np.ndarray, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
    """Return quantized @ weight.T, rounded to ``dtype`` once and not scaled; the next operator applies the scales.

    ``quantized`` float8_e4m3fn [..., inner] is a result of quantize_tokens. ``weight`` [width, inner] holds the bytes,
    uint8, of numbers in float8_e4m3fn.
    """
    return _exact(quantized, weight).astype(dtype)


def scaled_matmul(
    quantized: np.ndarray,
    scales: np.ndarray,
    weight: np.ndarray,
    weight_scales: np.ndarray,
    dtype: npt.DTypeLike = np.float32,
) -> np.ndarray:
    """Return (quantized @ weight.T) * scales * weight_scales, rounded to ``dtype`` once.

    As float8_matmul, with a scale per token, float32 [..., 1], and a scale per output, float32 [width].
    """
    scaled: np.ndarray = _exact(quantized, weight) * scales.astype(np.float64) * weight_scales.astype(np.float64)
    return scaled.astype(dtype)


def _exact(quantized: np.ndarray, weight: np.ndarray) -> np.ndarray:
    out: np.ndarray = quantized.astype(np.float64) @ weight.view(FLOAT8).astype(np.float64).T
    return out

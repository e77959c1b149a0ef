"""Products in float8_e4m3fn: what is multiplied, and the products with their scales and without."""

import ml_dtypes
import numpy as np
import numpy.typing as npt

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST = 448.0  # of float8_e4m3fn
LEAST_SCALE = 2.0**-100  # in place of the scale of a token of zeros


def quantize_tokens(x: npt.ArrayLike, static_scale: npt.ArrayLike | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return ``x`` [..., inner] over its scales in float8_e4m3fn, and the scales, float32 [..., 1].

    A token's scale makes its largest value the largest that float8 has; ``static_scale`` [1] takes its place where
    the checkpoint stores one for all, and what is larger becomes the largest. So no token depends on another.
    """
    wide = np.asarray(x).astype(np.float32)
    if static_scale is None:
        scales = np.maximum(np.abs(wide).max(-1, keepdims=True) / np.float32(LARGEST), np.float32(LEAST_SCALE))
    else:
        scales = np.full((*wide.shape[:-1], 1), static_scale, np.float32)
    bounded = np.clip(wide / scales, -LARGEST, LARGEST)
    return bounded.astype(FLOAT8), scales


def float8_product(quantized: np.ndarray, weight: np.ndarray, dtype: npt.DTypeLike = np.float32) -> np.ndarray:
    """Return quantized @ weight.T, rounded to ``dtype`` once; its scales are left to whoever reads it.

    ``quantized`` float8_e4m3fn [..., inner] is what quantize_tokens gives; ``weight`` [width, inner] are the bytes,
    uint8, of numbers in float8_e4m3fn.
    """
    return _exact(quantized, weight).astype(dtype)


def scaled_product(
    quantized: np.ndarray,
    scales: np.ndarray,
    weight: np.ndarray,
    weight_scales: np.ndarray,
    dtype: npt.DTypeLike = np.float32,
) -> np.ndarray:
    """Return (quantized @ weight.T) * scales * weight_scales, rounded to ``dtype`` once.

    As float8_product, with the scale of each token, float32 [..., 1], and of each output, float32 [width].
    """
    scaled: np.ndarray = _exact(quantized, weight) * scales.astype(np.float64) * weight_scales.astype(np.float64)
    return scaled.astype(dtype)


def _exact(quantized: np.ndarray, weight: np.ndarray) -> np.ndarray:
    product: np.ndarray = quantized.astype(np.float64) @ weight.view(FLOAT8).astype(np.float64).T
    return product

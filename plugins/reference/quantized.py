"""What stands between two products in float8: reads one without its scales, and rounds for the next."""

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.reference.float8 import quantize_tokens
from tandemrt.plugins.reference.swiglu import swiglu


def quantized_swiglu(
    gate_up: np.ndarray,
    product_scales: np.ndarray,
    weight_scales: np.ndarray,
    static_scale: npt.ArrayLike | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return quantize_tokens(swiglu(gate_up * product_scales * weight_scales)).

    ``gate_up`` [..., 2 * width] is what float8_product gives, with the scale of each token, float32 [..., 1], and of
    each output, float32 [2 * width]. Every step rounds to the dtype of ``gate_up``.
    """
    return quantize_tokens(swiglu(_scaled(gate_up, product_scales, weight_scales)), static_scale)


def quantized_norm(
    skip: np.ndarray,
    product: np.ndarray,
    product_scales: np.ndarray,
    weight_scales: np.ndarray,
    norm_weight: np.ndarray,
    static_scale: npt.ArrayLike | None = None,
    *,
    epsilon: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return quantize_tokens(norm(sum)) and the sum, skip + product * product_scales * weight_scales [..., hidden].

    ``product`` [..., hidden] is what float8_product gives, with its scales; the norm is the root-mean-square one with
    ``norm_weight`` [hidden]. Every step rounds to the dtype of ``skip``.
    """
    total = (skip.astype(np.float64) + _scaled(product, product_scales, weight_scales)).astype(skip.dtype)
    wide = total.astype(np.float64)
    normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + epsilon) * norm_weight.astype(np.float64)
    return *quantize_tokens(normed.astype(skip.dtype), static_scale), total


def _scaled(product: np.ndarray, scales: np.ndarray, weight_scales: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = product.astype(np.float64) * scales * weight_scales
    return scaled.astype(product.dtype)

"""Operators between two float8 matmuls: they apply the scales of the first and quantize for the second."""

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.reference.float8 import quantize_tokens
from tandemrt.plugins.reference.swiglu import swiglu


def quantized_swiglu(
    gate_up: np.ndarray,
    token_scales: np.ndarray,
    weight_scales: np.ndarray,
    static_scale: npt.ArrayLike | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return quantize_tokens(swiglu(gate_up * token_scales * weight_scales)).

    ``gate_up`` [..., 2 * width] is a result of float8_matmul, with a scale per token, float32 [..., 1], and a scale per
    output, float32 [2 * width]. Every step rounds to the dtype of ``gate_up``.
    """
    return quantize_tokens(swiglu(_scaled(gate_up, token_scales, weight_scales)), static_scale)


def quantized_norm(
    skip: np.ndarray,
    update: np.ndarray,
    token_scales: np.ndarray,
    weight_scales: np.ndarray,
    norm_weight: np.ndarray,
    static_scale: npt.ArrayLike | None = None,
    *,
    epsilon: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return quantize_tokens(norm(sum)) and the sum, skip + update * token_scales * weight_scales [..., hidden].

    ``update`` [..., hidden] is a result of float8_matmul, with its scales. The norm is the root-mean-square one with
    ``norm_weight`` [hidden]. Every step rounds to the dtype of ``skip``.
    """
    total = (skip.astype(np.float64) + _scaled(update, token_scales, weight_scales)).astype(skip.dtype)
    wide = total.astype(np.float64)
    normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + epsilon) * norm_weight.astype(np.float64)
    return *quantize_tokens(normed.astype(skip.dtype), static_scale), total


def _scaled(x: np.ndarray, scales: np.ndarray, weight_scales: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = x.astype(np.float64) * scales * weight_scales
    return scaled.astype(x.dtype)

"""``residual_norm``: the sum of two streams, and its root-mean-square norm."""

import numpy as np
import numpy.typing as npt


def residual_norm(
    x: npt.NDArray, update: npt.NDArray, weight: npt.NDArray[np.float32], *, epsilon: float
) -> tuple[npt.NDArray, npt.NDArray]:
    """Return (normed, sum) for ``x`` and ``update`` [..., width] of one dtype, in that dtype.

    The sum is rounded before it is normed: sum / sqrt(mean(sum²) + epsilon) * weight (Zhang and Sennrich, 2019).
    """
    total = (x.astype(np.float64) + update.astype(np.float64)).astype(x.dtype)
    wide = total.astype(np.float64)
    normed = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + epsilon) * weight.astype(np.float64)
    return normed.astype(x.dtype), total

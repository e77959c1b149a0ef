"""``tiled_matmul``: a matmul by a weight in tiles (plugins/operators/float_tiles.py)."""

import numpy as np

from tandemrt.plugins.operators.float_tiles import untiled


def tiled_matmul(x: np.ndarray, weight: np.ndarray, *, width: int) -> np.ndarray:
    """Return x @ w.T, float32 [..., width], for ``x`` [..., inner] and ``weight`` [tiles, inner * 16] of w.

    w may have more outputs than ``width``. ``weight`` may be float32, float16 or bfloat16. Computed in float64 and
    rounded once.
    """
    out: np.ndarray = x.astype(np.float64) @ untiled(weight)[:width].astype(np.float64).T
    return out.astype(np.float32)

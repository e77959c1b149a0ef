"""``linear``: a matmul with a stored weight."""

import numpy as np
import numpy.typing as npt


def linear(x: npt.ArrayLike, weight: npt.ArrayLike) -> np.ndarray:
    """Return x @ weight.T, floating [..., width], of ``x`` [..., inner] and ``weight`` [width, inner] of one dtype.

    Computed in float64 and rounded to that dtype once. On a GPU a row's result does not depend on the number of rows.
    """
    rows = np.asarray(x)
    out: np.ndarray = rows.astype(np.float64) @ np.asarray(weight).astype(np.float64).T
    return out.astype(rows.dtype)

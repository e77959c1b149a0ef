"""``gated_linear``: the matmul with an MLP's gates and ups, and their product."""

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.reference.linear import linear
from tandemrt.plugins.reference.swiglu import swiglu


def gated_linear(x: npt.ArrayLike, weight: npt.ArrayLike) -> np.ndarray:
    """Return swiglu of linear, floating [..., width], of ``weight`` [2 * width, inner]: gates first, then ups."""
    return swiglu(linear(x, weight))

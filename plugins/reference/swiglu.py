"""``swiglu``: the gated activation between the two matmuls of an MLP."""

import numpy as np
import numpy.typing as npt


def swiglu(gate_up: npt.ArrayLike) -> np.ndarray:
    """Return silu(gate) * up, floating [..., width], of ``gate_up`` [..., 2 * width]: gates first, then ups.

    Computed in float64 and rounded to the dtype of the input once (Shazeer, "GLU Variants Improve Transformer", 2020).
    """
    values = np.asarray(gate_up)
    if values.shape[-1] % 2:
        raise ValueError(f"gate_up: an even last dimension is needed, got {values.shape}")
    gate, up = np.split(values.astype(np.float64), 2, axis=-1)
    with np.errstate(over="ignore"):  # exp(-gate) of a very negative gate is infinite, and the result is correctly 0
        activated: np.ndarray = (gate / (1 + np.exp(-gate)) * up).astype(values.dtype)
    return activated

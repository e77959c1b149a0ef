"""``all_reduce`` and ``all_gather``: what the ranks of a tensor-parallel target compute together."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def all_reduce(x: npt.ArrayLike, others: Sequence[npt.ArrayLike] = ()) -> np.ndarray:
    """Return the sum of ``x`` of rank 0 and of ``others``, those of ranks 1 and up; all have one shape and dtype.

    Added in float32 in the order of the ranks and rounded to that dtype once, so every rank has the same bits, and the
    bits of a row do not depend on other rows. Without ``others`` there is one rank, and the sum is ``x``.
    """
    parts = [np.asarray(part) for part in (x, *others)]
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    return total.astype(parts[0].dtype)


def all_gather(x: npt.ArrayLike, width: int, others: Sequence[npt.ArrayLike] = ()) -> np.ndarray:
    """Return the columns [..., width] of all ranks, of ``x`` [..., part] of rank 0 and of ``others``.

    Those of rank r begin at column min(r * part, width - part): the last ranks repeat columns if the parts are wider
    than ``width`` together. Columns that several ranks have come from the highest of them.
    """
    parts = [np.asarray(part) for part in (x, *others)]
    part = parts[0].shape[-1]
    if not part <= width <= len(parts) * part:
        raise ValueError(f"width: from {part} to {len(parts) * part} is needed for {len(parts)} parts, got {width}")
    gathered = np.empty((*parts[0].shape[:-1], width), parts[0].dtype)
    for rank, columns in enumerate(parts):
        begin = min(rank * part, width - part)
        gathered[..., begin : begin + part] = columns
    return gathered

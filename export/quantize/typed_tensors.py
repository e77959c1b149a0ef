"""Find the tensors of a quantized weight, and check their dtypes and shapes."""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.values import read_values, require_scales

FLOATS = ("float32", "float16", "bfloat16")


def find(tensors: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    """Return the tensor ``name``. Raises BadCheckpoint if it is missing."""
    if name not in tensors:
        raise BadCheckpoint(f"tensor {quoted(name)} is missing, but its quantization_config requires it")
    return tensors[name]


def typed(
    tensors: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...], dtypes: Sequence[str] = ("int32",)
) -> StoredTensor:
    """Return the tensor ``name``. Raises BadCheckpoint unless it has ``shape`` and one of ``dtypes``."""
    return _one_of(tensors, name, (shape,), dtypes)


def scales_of(
    tensors: Mapping[str, StoredTensor],
    name: str,
    shape: tuple[int, int],
    *others: tuple[int, ...],
    used: int | None = None,
) -> npt.NDArray[np.float32]:
    """Return scales, float32 of ``shape``; they may be stored in one of the shapes ``others``.

    ``used``: the columns to return, others are padding and may hold any value. Raises BadCheckpoint unless the scales
    are floats, finite and above 0.
    """
    tensor = _one_of(tensors, name, (shape, *others), FLOATS)
    if used is None:
        require_scales(tensor)
    scales = read_values(tensor).astype(np.float32).reshape(shape)[:, :used]
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise BadCheckpoint(f"{tensor.file}: tensor {quoted(name)} should hold scales, finite and above 0")
    return scales


def _one_of(
    tensors: Mapping[str, StoredTensor], name: str, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]
) -> StoredTensor:
    tensor = find(tensors, name)
    if tensor.shape not in shapes or tensor.dtype not in dtypes:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(name)} should be {' or '.join(dtypes)}{list(shapes[0])} by its "
            f"quantization_config, it is {tensor.dtype}{list(tensor.shape)}"
        )
    return tensor

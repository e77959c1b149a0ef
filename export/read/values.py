"""Read the values of the stored tensors that the exporter computes with."""

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.read.checkpoint import StoredTensor

_OF_ML_DTYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def read_values(tensor: StoredTensor) -> npt.NDArray:
    """Read a tensor from its file, in its stored dtype and shape."""
    dtype = np.dtype(getattr(ml_dtypes, tensor.dtype) if tensor.dtype in _OF_ML_DTYPES else tensor.dtype)
    with tensor.file.open("rb") as file:
        file.seek(tensor.offset)
        values = np.frombuffer(file.read(tensor.nbytes), dtype)
    if tensor.columns is None:
        return values.reshape(tensor.shape)
    (inputs, count), (first, every) = tensor.shape, tensor.columns
    return values.reshape(inputs, every)[:, first : first + count]


def require_scales(tensor: StoredTensor) -> None:
    """Raise BadCheckpoint unless all values of ``tensor`` are finite and above zero."""
    scales = read_values(tensor).astype(np.float32)
    wrong = ~(np.isfinite(scales) & (scales > 0))
    if wrong.any():
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should hold scales, finite and above 0; {int(wrong.sum())} "
            f"of {scales.size} are not, the first is {scales[wrong][0]}; quantize the model again"
        )

"""Dtype views and conversions that work for torch tensors and HostTensors."""

from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.tensors.host_tensor import HostTensor, array_of
from tandemrt.plugins.tensors.protocol import Tensor


def viewed(tensor: Tensor, dtype: Any) -> Tensor:
    """Return the memory of ``tensor`` as elements of ``dtype``, torch's or a HostDtype."""
    return tensor.view(dtype if isinstance(tensor, HostTensor) else dtype_of_torch(dtype))


def host_floats(tensor: Any) -> npt.NDArray[np.float32]:
    """Return the values of ``tensor``, on any device and of any dtype, as float32 on the host."""
    array = array_of(tensor) if isinstance(tensor, HostTensor) else tensor.cpu().float().numpy()
    return np.asarray(array, np.float32)


def dtype_of_torch(dtype: Any) -> Any:
    """Return torch's dtype for a HostDtype, and any other value unchanged."""
    if not isinstance(dtype, str):
        return dtype
    import torch

    return getattr(torch, dtype.removeprefix("torch."))

"""Checks of the tensors that a launcher binds."""

import torch


def check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` is contiguous and has this dtype and shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: a contiguous {dtype}{list(shape)} is needed, got {tensor.dtype}{list(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )

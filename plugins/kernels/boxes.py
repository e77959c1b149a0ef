"""Describe tensors to the copy engine of Hopper, which copies boxes of them."""

import numpy as np
import torch
from cuda.bindings import driver

from tandemrt.plugins.operators.launch import Context

LINE = 128  # bytes of a box's line
_KINDS = {
    torch.bfloat16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    torch.float16: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    torch.float8_e4m3fn: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    torch.uint8: driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
}


def boxes(context: Context, tensor: torch.Tensor, lines: int, *, shared: bool = False) -> torch.Tensor:
    """Return the description, on its device, of contiguous ``tensor`` [count, inner] in boxes of ``lines`` lines.

    A line has LINE bytes, whose parts are permuted (128-byte swizzle). A box beyond the tensor reads zeros there, and
    writes nothing. ``shared``: other blocks soon read what is next to a box.
    """
    key = ("boxes", tensor.data_ptr(), tuple(tensor.shape), tensor.dtype, lines, shared)
    return context.get_or_create(key, lambda: _boxes(tensor, lines, shared=shared))


def _boxes(tensor: torch.Tensor, lines: int, *, shared: bool) -> torch.Tensor:
    (count, inner), size = tensor.shape, tensor.itemsize
    promotion = driver.CUtensorMapL2promotion
    status, tensor_map = driver.cuTensorMapEncodeTiled(
        _KINDS[tensor.dtype],
        2,
        tensor.data_ptr(),
        [driver.cuuint64_t(inner), driver.cuuint64_t(count)],
        [driver.cuuint64_t(inner * size)],
        [driver.cuuint32_t(LINE // size), driver.cuuint32_t(lines)],
        [driver.cuuint32_t(1), driver.cuuint32_t(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B if shared else promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed with {status.name} for {list(tensor.shape)}")
    words = np.array([int(word) for word in tensor_map.opaque], np.uint64)
    return torch.from_numpy(words.view(np.uint8)).to(tensor.device)

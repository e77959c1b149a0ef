"""Formats of weights of 4 or 8 bits on a GPU, and the kernel that dequantizes them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import Launch
from tandemrt.plugins.operators import float4
from tandemrt.plugins.operators.int4_layout import CHUNK, GROUP_SIZES, padded_inner, scales_of_output

THREADS = 256  # of a block


@dataclass(frozen=True)
class Format:
    """A format of weights: the ``name`` of its numbers, ``bits`` per number, and the group sizes that share a scale.

    ``more``: the name of the tensor that further describes the weight.
    """

    name: str
    bits: int
    groups: tuple[int, ...]
    more: str = ""

    def scales_of_output(self, inner: int, group: int) -> int:
        """Return how many scales are stored for an output."""
        return padded_inner(inner) // CHUNK if self.groups == (CHUNK,) else scales_of_output(inner, group)

    def variant(self, more: torch.Tensor | None) -> str:
        """Return what the names of kernels have before the dtype, for a weight that ``more`` describes."""
        return "_zeros" if self.more == "zeros" and more is not None else ""


INT4, INT8 = Format("int4", 4, GROUP_SIZES, "zeros"), Format("int8", 8, GROUP_SIZES)
FLOAT4, FLOAT8 = Format("float4", 4, float4.GROUP_SIZES, "factors"), Format("float8", 8, (CHUNK,))


def dequantization(
    kernel: Any,
    numbers: torch.Tensor,
    scales: torch.Tensor,
    more: torch.Tensor | None,
    shift: np.int32,
    values: torch.Tensor,
) -> Launch:
    """Bind the ``kernel`` that writes the ``values`` [outputs, inner] of a weight; ``shift``: of its group size."""
    outputs, inner = values.shape
    grid = (-(-numbers.numel() // 16 // THREADS), 1, 1)
    sizes = (np.int32(outputs), np.int32(inner), shift)
    return Launch(kernel, grid, (THREADS, 1, 1), numbers, scales, more, *sizes, values)

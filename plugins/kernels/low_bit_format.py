"""Formats of weights of 4 or 8 bits on a GPU, and the kernel that dequantizes them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import Launch
from tandemrt.plugins.operators import float4
from tandemrt.plugins.operators.int4_layout import CHUNK, GROUP_SIZES, padded_inner, scales_of_output
from tandemrt.plugins.operators.k_quants_layout import BLOCK, K_QUANTS

THREADS = 256  # of a block


@dataclass(frozen=True)
class Format:
    """A format of weights: the file ``name`` of its kernels, ``bits`` per number, and the sizes of groups with a scale.

    ``more``: the name of the tensor that further describes the weight. ``k_quant``: the name of a type in K_QUANTS.
    """

    name: str
    bits: int
    groups: tuple[int, ...]
    more: str = ""
    k_quant: str | None = None

    @property
    def inputs(self) -> int:
        """The inputs of a matmul must be a multiple of this."""
        return 32 if self.k_quant is None else BLOCK

    def scales_of_output(self, inner: int, group: int) -> int:
        """Return how many scales are stored for an output."""
        if self.k_quant is not None:
            return K_QUANTS[self.k_quant].scales_of_output(inner)
        return padded_inner(inner) // CHUNK if self.groups == (CHUNK,) else scales_of_output(inner, group)

    def variant(self, more: torch.Tensor | None, shift: int) -> str:
        """Return what the names of kernels have before the dtype, for a weight that ``more`` and ``shift`` describe."""
        if self.k_quant is not None:
            return f"_{self.k_quant}"
        if self.groups == float4.GROUP_SIZES:
            return f"_by{self.groups[shift]}"
        return "_zeros" if self.more == "zeros" and more is not None else ""


INT4, INT8 = Format("int4", 4, GROUP_SIZES, "zeros"), Format("int8", 8, GROUP_SIZES)
Q4_K, Q6_K = (Format("k_quants", quant.bits, (quant.group,), "factors", kind) for kind, quant in K_QUANTS.items())
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

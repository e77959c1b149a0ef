"""``scaled_product`` on the GPU: few rows by a kernel that reads the weight once, more by cuBLASLt through torch."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import Launch, current_stream, suffix
from tandemrt.plugins.launch import Call, Context, Tensors

_FEW = (8, 16)  # rows that the kernel is compiled for
_OUTPUTS = 16  # of a block of threads
_THREADS = 256


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:  # noqa: ARG001
    """See plugins/launch.py. Which way a product goes depends on its number of rows alone."""
    quantized, scales, weight, weight_scales, product = (
        tensors[name] for name in ("quantized", "scales", "weight", "weight_scales", "product")
    )
    width, inner = weight.shape
    rows = quantized.numel() // inner
    if quantized.shape[-1] != inner or product.shape[-1] != width or inner % 16 or width % 16:
        raise ValueError(
            f"weight: a multiple of 16 inputs and outputs is needed, those of quantized {tuple(quantized.shape)} and "
            f"product {tuple(product.shape)}, got {[width, inner]}"
        )
    module = context.module("float8")
    tile = next((tile for tile in _FEW if rows <= tile), None)
    if tile is None:
        scale = module.kernel(f"scale_product_{suffix(product)}")
        return ManyRows(quantized, scales, weight, weight_scales, product, scale)
    kernel = module.kernel(f"product_{tile}_{suffix(product)}")
    sizes = (np.int32(rows), np.int32(width), np.int32(inner))
    return FewRows(kernel, width, quantized, weight, scales, weight_scales, *sizes, product)


class FewRows:
    """A product by our kernel, bound. Capturable."""

    def __init__(self, kernel: Any, width: int, quantized: torch.Tensor, *arguments: Any) -> None:
        self._device = quantized.device
        self._launch = Launch(kernel, (width // _OUTPUTS, 1, 1), (_THREADS, 1, 1), quantized, *arguments)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


class ManyRows:
    """A product by cuBLASLt with no scales, and a kernel that applies them in place. Capturable."""

    def __init__(
        self,
        quantized: torch.Tensor,
        scales: torch.Tensor,
        weight: torch.Tensor,
        weight_scales: torch.Tensor,
        product: torch.Tensor,
        kernel: Any,
    ) -> None:
        width, inner = weight.shape
        self._rows, self._weight = quantized.view(-1, inner), weight.view(torch.float8_e4m3fn).t()
        self._product = product.view(-1, width)
        self._one = torch.ones(1, dtype=torch.float32, device=weight.device)
        grid = (-(-width // (8 * _THREADS)), len(self._rows), 1)
        self._scale = Launch(kernel, grid, (_THREADS, 1, 1), scales, weight_scales, np.int32(width), product)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        torch._scaled_mm(
            self._rows, self._weight, self._one, self._one, out_dtype=self._product.dtype, out=self._product
        )
        self._scale.run(current_stream(self._product.device))

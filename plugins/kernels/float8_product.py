"""Products in float8 on the GPU: cuBLASLt through torch, without scales, which is its fastest form at any row count."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import Launch, current_stream, suffix
from tandemrt.plugins.launch import Context, Tensors

_STEP = 16  # what cuBLASLt wants inputs and outputs to be a multiple of
_THREADS, _PER_THREAD = 256, 8


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "Product":  # noqa: ARG001
    """See plugins/launch.py."""
    return Product(tensors)


def launch_scaled(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "ScaledProduct":  # noqa: ARG001
    """See plugins/launch.py."""
    return ScaledProduct(context, tensors)


class Product:
    """A product without its scales, bound: bfloat16 or float32, since sums are too large for float16. Capturable."""

    def __init__(self, tensors: Tensors) -> None:
        quantized, weight, product = (tensors[name] for name in ("quantized", "weight", "product"))
        width, inner = weight.shape
        if quantized.shape[-1] != inner or product.shape[-1] != width or inner % _STEP or width % _STEP:
            raise ValueError(
                f"weight: outputs and inputs in multiples of {_STEP} are needed, for quantized "
                f"{tuple(quantized.shape)} and product {tuple(product.shape)}, got {(width, inner)}"
            )
        if product.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(f"product: bfloat16 or float32 is needed, got {product.dtype}")
        self._rows = quantized.view(-1, inner)
        self._weight = weight.view(torch.float8_e4m3fn).t()
        self._product = product.view(-1, width)
        self._one = torch.ones(1, dtype=torch.float32, device=weight.device)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        dtype = self._product.dtype
        torch._scaled_mm(self._rows, self._weight, self._one, self._one, out_dtype=dtype, out=self._product)


class ScaledProduct:
    """A product and, behind it, a kernel that applies its scales in place, bound. Capturable."""

    def __init__(self, context: Context, tensors: Tensors) -> None:
        product, scales, weight_scales = (tensors[name] for name in ("product", "scales", "weight_scales"))
        width = product.shape[-1]
        kernel = context.module("float8").kernel(f"scale_product_{suffix(product)}")
        grid = (-(-width // (_PER_THREAD * _THREADS)), product.numel() // width, 1)
        self._device = product.device
        self._product = Product(tensors)
        self._scale = Launch(kernel, grid, (_THREADS, 1, 1), scales, weight_scales, np.int32(width), product)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._product.run()
        self._scale.run(current_stream(self._device))

"""Products in float8 on the GPU: cuBLASLt's without scales, which is its fastest form at any row count.

Of many rows that is torch's call, of fewer the fastest of the library's algorithms. Where scales are asked for, a
kernel applies them behind it; for a few rows one kernel multiplies and scales.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.fastest_product import MOST_ROWS, FastestProduct
from tandemrt.plugins.kernels.linear import BatchInvariantProduct
from tandemrt.plugins.kernels.module import HOPPER, Launch, current_stream, suffix
from tandemrt.plugins.launch import Call, Context, Tensors

_STEP = 16  # what cuBLASLt wants inputs and outputs to be a multiple of
_THREADS, _PER_THREAD = 256, 8
FEW = 16  # rows that kernels of ours take
_TILE = 8  # of them that one instruction takes
_OUTPUTS = 32  # of one of their blocks
_STAGES = {8: 5, 16: 4}  # by the rows of a kernel, see float8_product.cuh
_STAGE = 4 * 16 * _THREADS  # bytes of shared memory


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:  # noqa: ARG001
    """See plugins/launch.py. Which way a product goes depends on its number of rows alone."""
    few = _rows(tensors) <= FEW and not context.batch_invariant
    return FewRows(context, tensors) if few else _many_rows(context, tensors)


def launch_scaled(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:  # noqa: ARG001
    """As :func:`launch`, with scales."""
    few = _rows(tensors) <= FEW and not context.batch_invariant
    return FewRows(context, tensors) if few else ScaledProduct(context, tensors)


def _many_rows(context: Context, tensors: Tensors) -> Call:
    if not context.batch_invariant and _rows(tensors) > MOST_ROWS:
        return Product(tensors)
    _require_sizes(tensors)
    _require_room(tensors["product"])  # scales, where there are some, follow behind it
    weight = tensors["weight"].view(torch.float8_e4m3fn)
    kind = BatchInvariantProduct if context.batch_invariant else FastestProduct
    return kind(context, tensors["quantized"], weight, tensors["product"])


class FewRows:
    """A product of at most 16 rows, with its scales if there are some, bound. Capturable."""

    def __init__(self, context: Context, tensors: Tensors) -> None:
        _require_sizes(tensors)
        quantized, weight, product = (tensors[name] for name in ("quantized", "weight", "product"))
        width, inner = weight.shape
        rows = _rows(tensors)
        if "scales" not in tensors:
            _require_room(product)
        module = context.module("float8")
        most = -(-rows // _TILE) * _TILE
        shared = _STAGES[most] * _STAGE
        inputs = (quantized, tensors.get("scales"), weight, tensors.get("weight_scales"))
        sizes = (np.int32(rows), np.int32(width), np.int32(inner))
        self._device = product.device
        self._launch = Launch(
            module.kernel(f"few_rows_{most}_{suffix(product)}", shared=shared),
            (-(-width // _OUTPUTS), 1, 1),
            (_THREADS, 1, 1),
            *inputs,
            *sizes,
            product,
            shared=shared,
            early=module.architecture >= HOPPER,
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


class Product:
    """A product without its scales, bound: bfloat16 or float32, since sums are too large for float16. Capturable."""

    def __init__(self, tensors: Tensors) -> None:
        _require_sizes(tensors)
        quantized, weight, product = (tensors[name] for name in ("quantized", "weight", "product"))
        width, inner = weight.shape
        _require_room(product)
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
        grid = (-(-width // (_PER_THREAD * _THREADS)) * (product.numel() // width), 1, 1)  # as swiglu's, for any rows
        self._device = product.device
        self._product = _many_rows(context, tensors)
        self._scale = Launch(kernel, grid, (_THREADS, 1, 1), scales, weight_scales, np.int32(width), product)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._product.run()
        self._scale.run(current_stream(self._device))


def _rows(tensors: Tensors) -> int:
    return tensors["quantized"].numel() // tensors["weight"].shape[1]


def _require_room(product: torch.Tensor) -> None:
    """Raise ValueError for a dtype that has no room for sums without scales."""
    if product.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"product: bfloat16 or float32 is needed, got {product.dtype}")


def _require_sizes(tensors: Tensors) -> None:
    """Raise ValueError for a product that does not fit together, or in which no kernel multiplies."""
    quantized, weight, product = (tensors[name] for name in ("quantized", "weight", "product"))
    width, inner = weight.shape
    if quantized.shape[-1] != inner or product.shape[-1] != width or inner % _STEP or width % _STEP:
        raise ValueError(
            f"weight: outputs and inputs in multiples of {_STEP} are needed, for quantized "
            f"{tuple(quantized.shape)} and product {tuple(product.shape)}, got {(width, inner)}"
        )

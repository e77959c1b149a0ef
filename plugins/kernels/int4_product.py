"""Products with weights of 4 bits on the GPU: a kernel reads the weight once for some rows, more rows go through torch.

For more rows a kernel writes the weight as numbers, so many outputs at a time that what it writes is small.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, current_stream, suffix
from tandemrt.plugins.launch import Call, Context, Tensors
from tandemrt.plugins.reference.int4 import BLOCKS, CHUNK, padded_inner, scales_of_output

_OUTPUTS, _INPUTS = 8, 32  # what these are a multiple of
_MOST_ROWS = 64  # of the kernel that reads the weight once
_SCRATCH = 64 << 20  # bytes of weights as numbers
_WARPS = 8  # of a block, which share the inputs of its outputs
_THREADS = 32 * _WARPS
_OF_WARP = 32  # outputs


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:
    """See plugins/launch.py. Which way a product goes depends on its number of rows alone."""
    operands = _Operands.of(tensors, attributes["block"])
    return FewRows(operands, context) if operands.rows <= _MOST_ROWS else ManyRows(operands, context)


@dataclass(frozen=True)
class _Operands:
    """What is multiplied. ``x`` [rows, inner] and ``product`` [rows, width] are flat; ``shift``: a scale is that of
    32 << shift inputs."""

    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    product: torch.Tensor
    shift: int

    @classmethod
    def of(cls, tensors: Tensors, block: int) -> "_Operands":
        """Raises ValueError for a product that does not fit together, or that no kernel computes."""
        x, weight, scales, product = (tensors[name] for name in ("x", "weight", "scales", "product"))
        inner, width = x.shape[-1], product.shape[-1]
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"x: bfloat16 or float16 is needed, got {x.dtype}")
        if inner % _INPUTS or width % _OUTPUTS or block not in BLOCKS:
            raise ValueError(
                f"product: inputs in multiples of {_INPUTS}, outputs of {_OUTPUTS} and a scale for "
                f"{', '.join(map(str, BLOCKS))} inputs are needed, got {inner}, {width} and {block}"
            )
        if weight.shape != (width, padded_inner(inner) // 2):
            raise ValueError(f"weight: {(width, padded_inner(inner) // 2)} is needed, got {tuple(weight.shape)}")
        if scales.shape != (width, scales_of_output(inner, block)):
            raise ValueError(f"scales: {(width, scales_of_output(inner, block))} is needed, got {tuple(scales.shape)}")
        flat = x.view(-1, inner), weight, scales, tensors.get("zeros"), product.view(-1, width)
        return cls(*flat, BLOCKS.index(block))

    @property
    def rows(self) -> int:
        return len(self.x)

    @property
    def width(self) -> int:
        return len(self.scales)

    @property
    def inner(self) -> int:
        return self.x.shape[1]


class FewRows:
    """A product by a kernel that reads the weight once for up to 64 rows, bound. Capturable."""

    def __init__(self, operands: _Operands, context: Context) -> None:
        module, o = context.module("int4"), operands
        tile = _tile(o, module)
        shared = 4 * _WARPS * tile.rows * (_OF_WARP + 4)
        zeros = "_zeros" if o.zeros is not None else ""
        kernel = module.kernel(f"int4_product_{tile.rows}{zeros}_{suffix(o.x)}", shared=shared)
        grid = (tile.blocks, -(-o.width // _OF_WARP), 1)  # a cluster lies along the first axis
        sizes = (np.int32(o.rows), np.int32(o.width), np.int32(o.inner), np.int32(o.shift))
        self._device = o.x.device
        self._launch = Launch(
            kernel,
            grid,
            (_THREADS, 1, 1),
            *(o.x, o.weight, o.scales, o.zeros, *sizes, o.product),
            shared=shared,
            cluster=tile.blocks,
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


class ManyRows:
    """A product of many rows, bound, by the weight as numbers in memory that an engine's products share. Capturable."""

    def __init__(self, operands: _Operands, context: Context) -> None:
        o, device = operands, operands.x.device
        size = _SCRATCH // o.x.element_size()
        make = lambda: torch.empty(size, dtype=o.x.dtype, device=device)  # noqa: E731
        scratch = context.keep(("int4 numbers", o.x.dtype), make)
        kernel = context.module("int4").kernel(f"int4_weights_{suffix(o.x)}")
        step = max(CHUNK, size // o.inner // CHUNK * CHUNK)
        self._device = device
        self._x = o.x
        self._parts = []
        for first in range(0, o.width, step):
            part = slice(first, min(first + step, o.width))
            numbers = scratch[: (part.stop - first) * o.inner].view(-1, o.inner)
            grid = (-(-numbers.shape[0] * 4 * o.weight.shape[1] // 64 // _THREADS), 1, 1)
            sizes = (np.int32(len(numbers)), np.int32(o.inner), np.int32(o.shift))
            zeros = None if o.zeros is None else o.zeros[part]
            arguments = (o.weight[part], o.scales[part], zeros, *sizes, numbers)
            made = Launch(kernel, grid, (_THREADS, 1, 1), *arguments)
            self._parts.append((made, numbers.t(), o.product[:, part]))

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        for made, numbers, product in self._parts:
            made.run(current_stream(self._device))
            torch.mm(self._x, numbers, out=product)


@dataclass(frozen=True)
class _Tile:
    """How a kernel cuts a product: its ``rows``, and how many ``blocks`` share the inputs."""

    rows: int
    blocks: int


def _tile(o: _Operands, module: KernelModule) -> _Tile:
    """The inputs of an output are shared by as many warps for any number of rows, so that these round alike."""
    rows = next(each for each in (8, 16, 32, 64) if o.rows <= each)
    few = -(-o.width // _OF_WARP) <= module.processors  # blocks, if none shared its inputs
    return _Tile(rows, 2 if few and module.architecture >= HOPPER else 1)

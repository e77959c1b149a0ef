"""Products with weights of 4 bits on the GPU: a kernel reads the weight once for some rows, more rows go through torch.

For more rows a kernel writes the weight as numbers, so many outputs at a time that what it writes is small.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import KernelModule, Launch, current_stream, suffix
from tandemrt.plugins.launch import Call, Context, Tensors
from tandemrt.plugins.reference.int4 import CHUNK

_BLOCKS = (32, 64, 128)  # inputs that share a scale
_STEP = 8  # what inputs and outputs are a multiple of
_MOST_ROWS = 64  # that the kernel takes
_SCRATCH = 64 << 20  # bytes of weights as numbers
_THREADS = 256
_CLUSTERS_FROM = 90


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:  # noqa: ARG001
    """See plugins/launch.py. Which way a product goes depends on its number of rows alone."""
    operands = _Operands.of(tensors)
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
    def of(cls, tensors: Tensors) -> "_Operands":
        """Raises ValueError for a product that does not fit together, or that no kernel computes."""
        x, weight, scales, product = (tensors[name] for name in ("x", "weight", "scales", "product"))
        inner, (width, blocks) = x.shape[-1], scales.shape
        padded = -(-inner // CHUNK) * CHUNK
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"x: bfloat16 or float16 is needed, got {x.dtype}")
        if product.shape[-1] != width or inner % _STEP or width % _STEP or padded // blocks not in _BLOCKS:
            raise ValueError(
                f"scales: outputs and inputs in multiples of {_STEP} and one for {', '.join(map(str, _BLOCKS))} inputs "
                f"are needed, for x {tuple(x.shape)} and product {tuple(product.shape)}, got {(width, blocks)}"
            )
        if weight.shape != (width, padded // 2):
            raise ValueError(f"weight: {(width, padded // 2)} is needed, got {tuple(weight.shape)}")
        shift = _BLOCKS.index(padded // blocks)
        return cls(x.view(-1, inner), weight, scales, tensors.get("zeros"), product.view(-1, width), shift)

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
    """A product of few rows, bound. Capturable."""

    def __init__(self, operands: _Operands, context: Context) -> None:
        module, o = context.module("int4"), operands
        tile = _tile(o, module)
        outputs = tile.outputs * tile.down
        shared = 4 * tile.along * tile.rows * (outputs + 4)
        zeros = "_zeros" if o.zeros is not None else ""
        kernel = module.kernel(f"int4_product_{tile.rows}{zeros}_{suffix(o.x)}", shared=shared)
        grid = (tile.blocks, -(-o.width // outputs), -(-o.rows // tile.rows))
        sizes = (np.int32(o.rows), np.int32(o.width), np.int32(o.inner), np.int32(o.shift))
        self._device = o.x.device
        self._launch = Launch(
            kernel,
            grid,
            (32 * tile.along, tile.down, 1),
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
    """How a kernel cuts a product: ``rows`` and ``outputs`` of a warp, the warps of a block ``along`` the inputs and
    ``down`` the outputs, and how many ``blocks`` share the inputs."""

    rows: int
    outputs: int
    along: int
    down: int
    blocks: int


def _tile(o: _Operands, module: KernelModule) -> _Tile:
    rows = next(each for each in (8, 16, 32, 64) if o.rows <= each)
    outputs, along, down = {8: (32, 8, 1), 16: (32, 8, 1), 32: (16, 4, 2), 64: (16, 4, 2)}[rows]
    blocks = 1
    most = 4 if module.architecture >= _CLUSTERS_FROM else 1
    while blocks < most and 2 * blocks * -(-o.width // (outputs * down)) <= 4 * module.processors:
        blocks *= 2
    return _Tile(rows, outputs, along, down, blocks)

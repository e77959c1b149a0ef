"""Matmuls with weights of 4 or 8 bits on a GPU.

For up to 64 rows a kernel reads the weight once. For more rows a kernel dequantizes the weight, some outputs at a time
so that the scratch memory stays small, and torch multiplies. For batch invariance the first kernel takes all rows of
windows, 64 at a time, and dequantized weights take all rows of prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.linear import BatchInvariantMatmul
from tandemrt.plugins.kernels.low_bit_format import (
    FLOAT4,
    INT4,
    INT8,
    Q4_K,
    Q6_K,
    THREADS,
    Format,
    dequantization,
)
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, Tensors, current_stream, suffix
from tandemrt.plugins.kernels.prompt_rows import CallInParts, split_rows
from tandemrt.plugins.operators.constants import LOW_BIT_OUTPUTS
from tandemrt.plugins.operators.int4_layout import CHUNK, padded_inner
from tandemrt.plugins.operators.launch import Call, Context

_MAX_ROWS = 64  # rows of the kernel that reads the weight once
_SCRATCH = 64 << 20  # bytes of dequantized weights
_WARPS = THREADS // 32  # of a block; they split the inputs (split-K)
_OF_WARP = 32  # outputs


def _launch(form: Format, tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:
    """Bind an operator. The number of rows alone selects the implementation; for batch invariance their kind does."""
    group_size = attributes.get("group_size", form.groups[0])
    if not context.batch_invariant:
        operands = _Operands.of(form, tensors, group_size)
        return LowBitFewRows(operands, context) if operands.rows <= _MAX_ROWS else ManyRows(operands, context)
    windows, prompts = split_rows(tensors, ("x", "out"))
    calls: list[Call] = [] if windows is None else rows_in_parts(_Operands.of(form, windows, group_size), context)
    if prompts is not None:
        calls.append(ManyRows(_Operands.of(form, prompts, group_size), context))
    return CallInParts(calls)


launch_int4, launch_int8, launch_float4 = (partial(_launch, form) for form in (INT4, INT8, FLOAT4))
launch_q4_k, launch_q6_k = (partial(_launch, form) for form in (Q4_K, Q6_K))


def rows_in_parts(operands: "_Operands", context: Context) -> list[Call]:
    """Bind the kernel for few rows to any number of rows, one part of them after another."""
    o, parts = operands, [slice(first, first + _MAX_ROWS) for first in range(0, operands.rows, _MAX_ROWS)]
    return [LowBitFewRows(replace(o, x=o.x[part], out=o.out[part]), context) for part in parts]


@dataclass(frozen=True)
class _Operands:
    """Validated operands; ``x`` [rows, inner] and ``out`` [rows, width] are flat.

    ``more``: zero points or factors. Group size: the smallest one of ``form``, << ``shift``.
    """

    form: Format
    x: torch.Tensor
    weight: torch.Tensor
    scales: torch.Tensor
    more: torch.Tensor | None
    out: torch.Tensor
    shift: int

    @classmethod
    def of(cls, form: Format, tensors: Tensors, group_size: int) -> "_Operands":
        """Check the tensors. Raises ValueError for shapes that do not match or that no kernel supports."""
        x, weight, scales, out = (tensors[name] for name in ("x", "weight", "scales", "out"))
        inner, width = x.shape[-1], out.shape[-1]
        if x.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"x: bfloat16 or float16 is needed, got {x.dtype}")
        if inner % form.inputs or width % LOW_BIT_OUTPUTS or group_size not in form.groups:
            raise ValueError(
                f"matmul: inputs in multiples of {form.inputs}, outputs of {LOW_BIT_OUTPUTS} and a scale for "
                f"{', '.join(map(str, form.groups))} inputs are needed, got {inner}, {width} and {group_size}"
            )
        if weight.shape != (shape := (width, padded_inner(inner) * form.bits // 8)):
            raise ValueError(f"weight: {shape} is needed, got {tuple(weight.shape)}")
        if scales.shape != (shape := (width, form.scales_of_output(inner, group_size))):
            raise ValueError(f"scales: {shape} is needed, got {tuple(scales.shape)}")
        flat = x.view(-1, inner), weight, scales, tensors.get(form.more), out.view(-1, width)
        return cls(form, *flat, form.groups.index(group_size))

    @property
    def rows(self) -> int:
        return len(self.x)

    @property
    def width(self) -> int:
        return len(self.scales)

    @property
    def inner(self) -> int:
        return self.x.shape[1]

    def kernel(self, module: KernelModule, name: str, *, shared: int = 0) -> Any:
        """Return the kernel ``name`` for these operands."""
        return module.kernel(f"{name}{self.form.variant(self.more, self.shift)}_{suffix(self.x)}", shared=shared)


class LowBitFewRows:
    """Bound matmul by a kernel that reads the weight once for up to 64 rows. Capturable."""

    def __init__(self, operands: _Operands, context: Context) -> None:
        module, o = KernelModule.of(context, operands.form.name), operands
        tile = _tile(o, module)
        shared = 4 * _WARPS * tile.rows * (_OF_WARP + 4)
        kernel = o.kernel(module, f"matmul_{tile.rows}", shared=shared)
        grid = (tile.blocks, -(-o.width // _OF_WARP), 1)  # a cluster extends along the first axis
        sizes = (np.int32(o.rows), np.int32(o.width), np.int32(o.inner), np.int32(o.shift))
        self._device = o.x.device
        self._launch = Launch(
            kernel,
            grid,
            (THREADS, 1, 1),
            o.x,
            o.weight,
            o.scales,
            o.more,
            *sizes,
            o.out,
            shared=shared,
            cluster=tile.blocks,
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


class ManyRows:
    """Bound matmul of many rows with a dequantized weight, in scratch memory that an engine shares. Capturable.

    For batch invariance, of any number of rows.
    """

    def __init__(self, operands: _Operands, context: Context) -> None:
        o, device = operands, operands.x.device
        size = _SCRATCH // o.x.element_size()
        make = lambda: torch.empty(size, dtype=o.x.dtype, device=device)  # noqa: E731
        scratch = context.get_or_create(("dequantized weights", o.x.dtype), make)
        kernel = o.kernel(KernelModule.of(context, o.form.name), "weights")
        step = max(CHUNK, size // o.inner // CHUNK * CHUNK)
        self._device = device
        self._parts: list[tuple[Launch, Call]] = []
        for first in range(0, o.width, step):
            part = slice(first, min(first + step, o.width))
            numbers = scratch[: (part.stop - first) * o.inner].view(-1, o.inner)
            more = None if o.more is None else o.more[part]
            dequantize = dequantization(kernel, o.weight[part], o.scales[part], more, np.int32(o.shift), numbers)
            multiply = BatchInvariantMatmul if context.batch_invariant else _Multiplication
            self._parts.append((dequantize, multiply(context, o.x, numbers, o.out[:, part])))

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        for dequantize, matmul in self._parts:
            dequantize.run(current_stream(self._device))
            matmul.run()


class _Multiplication:
    """Bound matmul x [rows, inner] @ weight.T into out [rows, width] by torch's choice of algorithm."""

    def __init__(self, context: Context, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:  # noqa: ARG002
        self._x, self._weight, self._out = x, weight.t(), out

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        torch.mm(self._x, self._weight, out=self._out)


@dataclass(frozen=True)
class _Tile:
    """Work split of a kernel: ``rows`` per tile, and the number of thread ``blocks`` that split the inputs."""

    rows: int
    blocks: int


def _tile(o: _Operands, module: KernelModule) -> _Tile:
    """Choose a split. The number of warps per output does not depend on the rows, so rounding does not either."""
    rows = next(each for each in (8, 16, 32, 64) if o.rows <= each)
    few = -(-o.width // _OF_WARP) <= module.sm_count  # too few blocks for all SMs
    return _Tile(rows, 2 if few and module.architecture >= HOPPER else 1)

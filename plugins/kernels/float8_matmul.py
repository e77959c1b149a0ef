"""Float8 matmuls on a GPU: our kernel for up to 16 rows, cuBLASLt for more.

cuBLASLt multiplies without scales, which is its fastest form: through torch for many rows, with the fastest of its
algorithms for fewer. A second kernel then applies the scales, if there are any. Our kernel applies them itself. For
batch invariance another kernel of ours adds in cuBLASLt's order (float8_ordered.py).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.fastest_matmul import MOST_ROWS, FastestMatmul
from tandemrt.plugins.kernels.linear import BatchInvariantMatmul
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, Tensors, current_stream, suffix
from tandemrt.plugins.operators.launch import Call, Context

_STEP = 16  # cuBLASLt needs inputs and outputs in multiples of this
_THREADS, _PER_THREAD = 256, 8
FEW = 16  # most rows of our kernels
_TILE = 8  # rows of one tensor core instruction
_OUTPUTS = 32  # outputs of a thread block
_STAGES = {8: 5, 16: 4}  # by the rows of a kernel, see float8_matmul.cuh
_STAGE = 4 * 16 * _THREADS  # bytes of shared memory


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:  # noqa: ARG001
    """Bind the operator. The number of rows alone selects the implementation."""
    if context.batch_invariant:
        return _any_rows(context, tensors)
    return Float8FewRows(context, tensors) if _rows(tensors) <= FEW else _many_rows(context, tensors)


def launch_scaled(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Call:  # noqa: ARG001
    """Bind ``scaled_matmul``; otherwise as :func:`launch`."""
    if context.batch_invariant:
        matmul = _any_rows(context, tensors)
        return matmul if matmul.applies_scales else ScaledMatmul(context, tensors, matmul)
    if _rows(tensors) <= FEW:
        return Float8FewRows(context, tensors)
    return ScaledMatmul(context, tensors, _many_rows(context, tensors))


def _many_rows(context: Context, tensors: Tensors) -> Call:
    if _rows(tensors) > MOST_ROWS:
        return Float8Matmul(tensors)
    _require_sizes(tensors)
    _require_room(tensors["out"])  # a kernel applies the scales afterwards
    return FastestMatmul(context, *_operands(tensors))


def _operands(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tensors["quantized"], tensors["weight"].view(torch.float8_e4m3fn), tensors["out"]


def _any_rows(context: Context, tensors: Tensors) -> BatchInvariantMatmul:
    """Bind a matmul whose rows have the same bits for any number of rows."""
    _require_sizes(tensors)
    _require_room(tensors["out"])
    scales = (tensors["scales"], tensors["weight_scales"]) if "scales" in tensors else None
    return BatchInvariantMatmul(context, *_operands(tensors), scales)


class Float8FewRows:
    """Bound matmul of at most 16 rows, with its scales if there are any. Capturable."""

    def __init__(self, context: Context, tensors: Tensors) -> None:
        _require_sizes(tensors)
        quantized, weight, out = (tensors[name] for name in ("quantized", "weight", "out"))
        width, inner = weight.shape
        rows = _rows(tensors)
        if "scales" not in tensors:
            _require_room(out)
        module = KernelModule.of(context, "float8")
        most = -(-rows // _TILE) * _TILE
        shared = _STAGES[most] * _STAGE
        inputs = (quantized, tensors.get("scales"), weight, tensors.get("weight_scales"))
        sizes = (np.int32(rows), np.int32(width), np.int32(inner))
        self._device = out.device
        self._launch = Launch(
            module.kernel(f"few_rows_{most}_{suffix(out)}", shared=shared),
            (-(-width // _OUTPUTS), 1, 1),
            (_THREADS, 1, 1),
            *inputs,
            *sizes,
            out,
            shared=shared,
            early=module.architecture >= HOPPER,
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


class Float8Matmul:
    """Bound matmul without scales: bfloat16 or float32, since sums overflow float16. Capturable."""

    def __init__(self, tensors: Tensors) -> None:
        _require_sizes(tensors)
        quantized, weight, out = (tensors[name] for name in ("quantized", "weight", "out"))
        width, inner = weight.shape
        _require_room(out)
        self._rows = quantized.view(-1, inner)
        self._weight = weight.view(torch.float8_e4m3fn).t()
        self._matmul = out.view(-1, width)
        self._one = torch.ones(1, dtype=torch.float32, device=weight.device)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        dtype = self._matmul.dtype
        torch._scaled_mm(self._rows, self._weight, self._one, self._one, out_dtype=dtype, out=self._matmul)


class ScaledMatmul:
    """Bound matmul, followed by a kernel that applies its scales in place. Capturable."""

    def __init__(self, context: Context, tensors: Tensors, matmul: Call) -> None:
        out, scales, weight_scales = (tensors[name] for name in ("out", "scales", "weight_scales"))
        width = out.shape[-1]
        kernel = KernelModule.of(context, "float8").kernel(f"scale_matmul_{suffix(out)}")
        # one axis, as in swiglu, for any number of rows
        grid = (-(-width // (_PER_THREAD * _THREADS)) * (out.numel() // width), 1, 1)
        self._device = out.device
        self._matmul = matmul
        self._scale = Launch(kernel, grid, (_THREADS, 1, 1), scales, weight_scales, np.int32(width), out)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._matmul.run()
        self._scale.run(current_stream(self._device))


def _rows(tensors: Tensors) -> int:
    return tensors["quantized"].numel() // tensors["weight"].shape[1]


def _require_room(out: torch.Tensor) -> None:
    """Raise ValueError for float16, which overflows when sums are not scaled yet."""
    if out.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"out: bfloat16 or float32 is needed, got {out.dtype}")


def _require_sizes(tensors: Tensors) -> None:
    """Raise ValueError for shapes that do not match or that no kernel supports."""
    quantized, weight, out = (tensors[name] for name in ("quantized", "weight", "out"))
    width, inner = weight.shape
    if quantized.shape[-1] != inner or out.shape[-1] != width or inner % _STEP or width % _STEP:
        raise ValueError(
            f"weight: outputs and inputs in multiples of {_STEP} are needed, for quantized "
            f"{tuple(quantized.shape)} and out {tuple(out.shape)}, got {(width, inner)}"
        )

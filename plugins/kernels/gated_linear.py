"""``gated_linear`` on a GPU: an MLP's gates and ups, and their product, with equal bits for any number of rows.

Many rows go through a kernel of ours on Hopper, which never writes the matmul's result (gated_linear.cuh). Others go
through the matmul of ``linear`` and the kernel of ``swiglu``, some rows at a time. Both give the same bits: binding
tries the kernel on random rows and weights, and does not use it otherwise.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.boxes import LINE, boxes
from tandemrt.plugins.kernels.cublaslt import Algorithm
from tandemrt.plugins.kernels.linear import BatchInvariantMatmul
from tandemrt.plugins.kernels.matmul_choices import Choices
from tandemrt.plugins.kernels.matmul_trials import random_like, random_rows, repeated, same_bits
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, current_stream, suffix
from tandemrt.plugins.kernels.prompt_rows import CallInParts
from tandemrt.plugins.kernels.swiglu import SwigluLauncher
from tandemrt.plugins.operators.launch import Call, Context
from tandemrt.plugins.tensors.devices.lookup import device_of

MANY = 512  # least rows of our kernel
_LEAST_SHARE = 0.9  # of the outputs of all waves of tiles that a call needs; cuBLASLt has more sizes of tiles
_SCRATCH_ROWS = 2048  # whose matmul's result is kept at a time
_TRIED_ROWS = 64
_BLOCK, _GROUP_ROWS = 128, 64  # rows and outputs of a block, and rows of a multiplying group
_THREADS = 384
_SHARED = 4 * 3 * _BLOCK * LINE + 2 * 2 * _GROUP_ROWS * LINE  # stages of rows, gates and ups; results


def launch(
    tensors: Mapping[str, torch.Tensor],
    attributes: Mapping[str, Any],  # noqa: ARG001
    context: Context,
) -> Call:
    """Bind the operator; see Launcher in plugins/operators/launch.py. Raises as BatchInvariantMatmul does."""
    x, weight, activated = (tensors[name] for name in ("x", "weight", "activated"))
    rows, results = x.view(-1, x.shape[-1]), activated.view(-1, activated.shape[-1])
    if len(rows) >= MANY and _fills_tiles(context, rows, results) and _serves(context, weight):
        return GatedMatmul(context, rows, weight, results)
    parts = [slice(at, at + _SCRATCH_ROWS) for at in range(0, len(rows), _SCRATCH_ROWS)]
    return CallInParts(
        [call for part in parts for call in _matmul_and_swiglu(context, rows[part], weight, results[part])]
    )


def _matmul_and_swiglu(context: Context, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> tuple[Call, Call]:
    def scratch() -> torch.Tensor:
        return torch.empty(_SCRATCH_ROWS, len(weight), dtype=weight.dtype, device=weight.device)

    gate_up = context.get_or_create(("gate_up", len(weight), weight.dtype), scratch)[: len(x)]
    swiglu = SwigluLauncher(KernelModule.of(context, "swiglu"), gate_up, out)
    return BatchInvariantMatmul(context, x, weight, gate_up), swiglu


def _tiles(rows: int, width: int) -> int:
    return -(-rows // (2 * _BLOCK)) * -(-width // _BLOCK)


def _fills_tiles(context: Context, x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether the tiles of our kernel, which run in waves, have few outputs that are not there."""
    at_once = device_of(context.device).processors // 2
    waves = -(-_tiles(len(x), out.shape[1]) // at_once)
    return out.numel() >= _LEAST_SHARE * waves * at_once * 2 * _BLOCK * _BLOCK


class GatedMatmul:
    """Bound call of our kernel: x [rows, inner], weight [2 * width, inner], into out [rows, width]. Capturable."""

    def __init__(self, context: Context, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        (rows, inner), width = x.shape, out.shape[1]
        module = KernelModule.of(context, "gated_linear")
        self._keep = x, weight, out  # the boxes hold their addresses
        self._device = out.device
        self._launch = Launch(
            module.kernel(f"gated_linear_{suffix(out)}", shared=_SHARED),
            (2 * min(_tiles(rows, width), module.sm_count // 2), 1, 1),
            (_THREADS, 1, 1),
            boxes(context, x, _BLOCK, shared=True),
            boxes(context, weight, _BLOCK, shared=True),
            boxes(context, out, _GROUP_ROWS),
            np.int32(rows),
            np.int32(width),
            np.int32(inner),
            shared=_SHARED,
            cluster=2,
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


def _serves(context: Context, weight: torch.Tensor) -> bool:
    """Whether our kernel runs on the context's device and gives the bits of the matmul and the kernel of swiglu."""
    if weight.dtype not in (torch.bfloat16, torch.float16) or device_of(context.device).capability != (9, 0):
        return False
    if KernelModule.of(context, "gated_linear").architecture != HOPPER or len(weight) % 16 or weight.shape[1] % 8:
        return False
    key = f"gated {list(weight.shape)} {weight.dtype}"

    def choose() -> Algorithm | None:
        return None if _same(context, weight) else Algorithm()

    return context.get_or_create(key, lambda: Choices.of(context).get_or_try(key, lambda _: True, choose) is None)


def _same(context: Context, weight: torch.Tensor) -> bool:
    drawn = random_like(weight)
    some = random_rows(_TRIED_ROWS, weight.shape[1], 0, weight)
    wanted, result = (some.new_empty(rows, len(weight) // 2) for rows in (_TRIED_ROWS, MANY))
    for call in _matmul_and_swiglu(context, some, drawn, wanted):
        call.run()
    GatedMatmul(context, repeated(some, MANY), drawn, result).run()
    return same_bits(result, repeated(wanted, MANY))

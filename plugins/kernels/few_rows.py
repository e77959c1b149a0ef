"""Matmuls of few rows on a GPU by our own kernels (linear.cuh), which add inputs in order.

Weights of few outputs, such as those of routers, have a kernel of their own, for more rows.
"""

import numpy as np
import torch

from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, current_stream, suffix
from tandemrt.plugins.operators.launch import Context

_MAX_ROWS, _MAX_ROWS_OF_NARROW = 16, 320
_NARROW = 512  # most outputs of a narrow weight
_TILE = 8  # rows of one tensor core instruction
_CHUNK = 64  # inputs must be a multiple of this
_OUTPUTS = 16  # outputs per warp
_MAX_WARPS = 8  # warps per block
# chunks of the weight, and of the rows, that are read ahead: more where few warps share an SM
_DEEP, _SHALLOW = (16, 4), (6, 2)
_DEEP_WARPS = 4  # most warps per block that read that far ahead
_CHUNK_BYTES = 2 * _CHUNK * _OUTPUTS
_ROW_BYTES = 2 * (512 + 8)  # per row and chunk, see ROW_PITCH of linear.cuh
_NARROW_THREADS = 256


class FewRowsMatmul:
    """Bound matmul x [rows, inner] @ weight.T, weight [width, inner], into out [rows, width].

    ``out`` may be columns of a wider tensor. Capturable.
    """

    def __init__(self, context: Context, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        (rows, inner), width = x.shape, len(weight)
        module = KernelModule.of(context, "linear")
        sizes = (np.int32(rows), np.int32(width), np.int32(inner), np.int32(out.stride(0)))
        self._device = out.device
        if _is_narrow(module, weight):
            shared, grid = _narrow_bytes(inner), (-(-width // _OUTPUTS), -(-rows // _TILE), 1)
            kernel = module.kernel(f"narrow_rows_{suffix(out)}", shared=shared)
            threads = (_NARROW_THREADS, 1, 1)
            self._launch = Launch(kernel, grid, threads, x, weight, *sizes, out, shared=shared, early=True)
            return
        warps = _warps(-(-width // _OUTPUTS), module.sm_count)
        stages, row_stages = _DEEP if warps <= _DEEP_WARPS else _SHALLOW
        most = -(-rows // _TILE) * _TILE
        shared = warps * stages * _CHUNK_BYTES + most * row_stages * _ROW_BYTES
        self._launch = Launch(
            module.kernel(f"few_rows_{most}_{stages}_{suffix(out)}", shared=shared),
            (-(-width // (_OUTPUTS * warps)), 1, 1),
            (32 * warps, 1, 1),
            x,
            weight,
            *sizes,
            out,
            shared=shared,
            early=True,
        )

    @staticmethod
    def serves(context: Context, rows: int, weight: torch.Tensor) -> bool:
        """Whether the kernel supports this many rows of this weight on the context's device."""
        if weight.dtype not in (torch.bfloat16, torch.float16) or weight.shape[1] % _CHUNK:
            return False
        module = KernelModule.of(context, "linear")
        most = _MAX_ROWS_OF_NARROW if _is_narrow(module, weight) else _MAX_ROWS
        return rows <= most and module.architecture >= HOPPER

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


def _is_narrow(module: KernelModule, weight: torch.Tensor) -> bool:
    """Return whether a block of the kernel for narrow weights has its outputs and rows in shared memory."""
    return len(weight) <= _NARROW and _narrow_bytes(weight.shape[1]) <= module.shared_memory


def _narrow_bytes(inner: int) -> int:
    return 2 * (_OUTPUTS * inner + _TILE * (inner + 8))


def _warps(tiles: int, sm_count: int) -> int:
    """Choose the warps per block so that all blocks run at once, or so that every SM has as many."""
    of_sm = -(-tiles // sm_count)
    return -(-of_sm // -(-of_sm // _MAX_WARPS))

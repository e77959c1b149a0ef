"""Matmuls of at most 16 rows on a GPU by our own kernel (linear.cuh), which adds inputs in order."""

import numpy as np
import torch

from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, current_stream, suffix
from tandemrt.plugins.operators.launch import Context

_MAX_ROWS = 16
_TILE = 8  # rows of one tensor core instruction
_CHUNK = 64  # inputs must be a multiple of this
_OUTPUTS = 16  # outputs per warp
_MAX_WARPS = 8  # warps per block
# chunks of the weight, and of the rows, that are read ahead: more where few warps share an SM
_DEEP, _SHALLOW = (16, 4), (6, 2)
_DEEP_WARPS = 4  # most warps per block that read that far ahead
_CHUNK_BYTES = 2 * _CHUNK * _OUTPUTS
_ROW_BYTES = 2 * (512 + 8)  # per row and chunk, see ROW_PITCH of linear.cuh


class FewRowsMatmul:
    """Bound matmul x [rows, inner] @ weight.T, weight [width, inner], into out [rows, width].

    ``out`` may be columns of a wider tensor. Capturable.
    """

    def __init__(self, context: Context, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
        (rows, inner), width = x.shape, len(weight)
        module = KernelModule.of(context, "linear")
        warps = _warps(-(-width // _OUTPUTS), module.sm_count)
        stages, row_stages = _DEEP if warps <= _DEEP_WARPS else _SHALLOW
        most = -(-rows // _TILE) * _TILE
        shared = warps * stages * _CHUNK_BYTES + most * row_stages * _ROW_BYTES
        self._device = out.device
        self._launch = Launch(
            module.kernel(f"few_rows_{most}_{stages}_{suffix(out)}", shared=shared),
            (-(-width // (_OUTPUTS * warps)), 1, 1),
            (32 * warps, 1, 1),
            x,
            weight,
            np.int32(rows),
            np.int32(width),
            np.int32(inner),
            np.int32(out.stride(0)),
            out,
            shared=shared,
            early=True,
        )

    @staticmethod
    def serves(context: Context, rows: int, weight: torch.Tensor) -> bool:
        """Whether the kernel supports this many rows of this weight on the context's device."""
        if weight.dtype not in (torch.bfloat16, torch.float16) or rows > _MAX_ROWS or weight.shape[1] % _CHUNK:
            return False
        return KernelModule.of(context, "linear").architecture >= HOPPER

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


def _warps(tiles: int, sm_count: int) -> int:
    """Choose the warps per block so that all blocks run at once, or so that every SM has as many."""
    of_sm = -(-tiles // sm_count)
    return -(-of_sm // -(-of_sm // _MAX_WARPS))

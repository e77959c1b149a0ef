"""Float8 matmuls of at most 16 rows on Hopper that add inputs in cuBLASLt's order (float8_ordered.cuh)."""

import numpy as np
import torch

from tandemrt.plugins.kernels.boxes import boxes
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, current_stream, suffix
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.tensors.devices.lookup import device_of

_MAX_ROWS = 16
_TILE = 8  # rows of a tile
_OUTPUTS = 16  # outputs of a warpgroup
_GROUP = 128  # threads of a warpgroup
_CHUNK, _CHUNKS = 128, 4  # inputs, and bytes, that a warp sums at a time; warps of a warpgroup
_GROUPS = 2  # warpgroups of a block
_WINDOW = 4 * _CHUNKS  # chunks of a window, whose sums are added together
_RING = 3  # windows of the rows in shared memory, where not all of them fit
_SHARED = 226 << 10  # bytes of shared memory for a block

Scales = tuple[torch.Tensor, torch.Tensor]  # of the rows and of the outputs


class OrderedMatmul:
    """Bound matmul x [rows, inner] @ weight.T, weight [width, inner], into out [rows, width]. Capturable.

    ``scales`` are applied to the rounded result, as a kernel after cuBLASLt does.
    """

    def __init__(
        self, context: Context, x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, scales: Scales | None = None
    ) -> None:
        (rows, inner), width = x.shape, len(weight)
        module = KernelModule.of(context, "float8")
        tiles, sets = -(-rows // _TILE), -(-width // (_OUTPUTS * _GROUPS))
        stages = _stages(sets, tiles, module.sm_count)
        of_window, sums = _WINDOW * tiles * _TILE * _CHUNK, 2 * _WINDOW * tiles * _GROUP * 4
        fixed = _GROUPS * (_CHUNKS * stages * _OUTPUTS * _CHUNK + sums)
        windows, room = -(-inner // (_WINDOW * _CHUNK)), (_SHARED - fixed) // of_window
        slots = windows if windows <= room else min(room, _RING)
        shared = fixed + slots * of_window
        of_tokens, of_outputs = scales or (None, None)
        self._keep = x  # the boxes hold its address
        self._device = out.device
        self._launch = Launch(
            module.kernel(f"few_ordered_{tiles * _TILE}_{stages}_{suffix(out)}", shared=shared),
            (min(sets, module.sm_count), 1, 1),
            (_GROUP * _GROUPS, 1, 1),
            boxes(context, x, tiles * _TILE),
            of_tokens,
            weight,
            of_outputs,
            np.int32(rows),
            np.int32(width),
            np.int32(inner),
            np.int32(slots),
            out,
            shared=shared,
            early=True,
        )

    @staticmethod
    def serves(context: Context, rows: int, weight: torch.Tensor) -> bool:
        """Whether the kernel supports this many rows of this weight on the context's device."""
        if weight.dtype != torch.float8_e4m3fn or rows > _MAX_ROWS or device_of(context.device).capability != (9, 0):
            return False
        return KernelModule.of(context, "float8").architecture == HOPPER

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


def _stages(sets: int, tiles: int, sm_count: int) -> int:
    """Return the stages of the weight, the fastest ones of an 8B model's shapes."""
    return 8 if tiles == 1 and sets > sm_count else 6

"""Launch plan of ``window_attention`` for heads of 512 values in 16 bits (attention_wide.cuh)."""

from dataclasses import dataclass

import torch

from tandemrt.engines.recipe.backends import CPU
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.kernels.attention_plan import KEYS
from tandemrt.plugins.operators.constants import WIDE_HEAD_DIM

WIDE_BLOCK = (256, 1, 1)  # threads per block
_WARPS, _CLASSES = 8, 8  # wide_tile.cuh, attention_wide.cuh
_WINDOW_ROWS, _RUN_ROWS = (32, 16), (64, 16)  # row tiles that the kernels are compiled for
_BUFFERS = (3, 2, 1)  # of keys or values of a step, in shared memory
_STATIC = 1024  # bytes of shared memory that a kernel has besides


def is_wide(dtype: torch.dtype, head_dim: int) -> bool:
    """Return whether these heads have kernels of their own."""
    return head_dim == WIDE_HEAD_DIM and dtype != torch.float32


@dataclass(frozen=True)
class WidePlan:
    """Launch plan for ``texts`` windows, or for all prompt runs as one text, with ``tiles`` tiles of ``rows`` rows.

    ``splits``: blocks that share the keys of a tile; no bit depends on them, nor on any other field. ``buffers``: how
    many halves of steps, keys or values, are in shared memory.
    """

    texts: int
    kv_heads: int
    rows: int
    tiles: int
    splits: int
    buffers: int
    head_dim: int = WIDE_HEAD_DIM

    @classmethod
    def of_windows(
        cls, *, batch: int, lines: int, kv_heads: int, sm_count: int, shared_memory: int, splits: int | None = None
    ) -> "WidePlan":
        """Plan windows with ``lines`` rows per KV head.

        ``sm_count``, ``shared_memory``: SMs of the device, and bytes of a thread block. ``splits`` overrides the
        choice: 1 or all. Raises BackendUnavailable for a device with too little shared memory.
        """
        if splits not in (None, 1, _CLASSES):
            raise ValueError(f"splits: 1 or {_CLASSES} are needed for heads of {WIDE_HEAD_DIM}, got {splits}")
        rows, buffers = _fitting(_WINDOW_ROWS, lines, shared_memory)
        tiles = -(-lines // rows)
        if splits is None:  # several thread blocks after one another take longer than one that has all keys
            splits = _CLASSES if 3 * batch * kv_heads * tiles <= sm_count else 1
        return cls(batch, kv_heads, rows, tiles, splits, buffers)

    @classmethod
    def of_runs(cls, *, runs: int, lines: int, kv_heads: int, shared_memory: int) -> "WidePlan":
        """Plan prompt runs with ``lines`` rows per KV head in all. Otherwise as ``of_windows``."""
        rows, buffers = _fitting(_RUN_ROWS, lines, shared_memory)
        return cls(1, kv_heads, rows, -(-lines // rows) + runs - 1, 1, buffers)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory per thread block."""
        return _shared(self.rows, self.buffers)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.tiles * self.splits, self.kv_heads, self.texts

    @property
    def shared_rows(self) -> int:
        """Row tiles whose keys are split; each needs a ticket."""
        return self.texts * self.kv_heads * self.tiles if self.splits > 1 else 0

    @property
    def parts(self) -> int:
        """Rows of partial results."""
        return self.shared_rows * self.splits * self.rows


def _fitting(sizes: tuple[int, ...], lines: int, shared_memory: int) -> tuple[int, int]:
    """Return the smallest row tile that holds ``lines``, or the largest that fits the device, and its buffers."""
    least = sizes[-1]
    for rows in sizes:
        for buffers in _BUFFERS:
            if (rows == least or lines > least) and _shared(rows, buffers) + _STATIC <= shared_memory:
                return rows, buffers
    raise BackendUnavailable(
        f"device: attention heads of {WIDE_HEAD_DIM} values need {_shared(least, 1) + _STATIC} bytes of shared memory "
        f"per thread block, the device has {shared_memory}; choose {CPU}"
    )


def _shared(rows: int, buffers: int) -> int:
    """Return the bytes of queries, weights and buffers, then the largest scores of each group of warps, and totals."""
    groups = 16 * _WARPS // rows
    return 2 * (rows * (WIDE_HEAD_DIM + KEYS) + buffers * KEYS * WIDE_HEAD_DIM) + 4 * rows * (groups + 1)

"""Launch plan of ``window_attention`` for a call shape: row tiles, and splits of the keys (split-KV)."""

from dataclasses import dataclass

import numpy as np
import torch

KEYS = 64  # positions that a thread block processes per step; the KV cache block size must be a multiple
WARPS = 4
BLOCK = (32 * WARPS, 1, 1)  # threads per block
MAX_SPLITS = 32
MAX_CLUSTER = 8  # thread blocks of a cluster, on every device that supports clusters
_WORTHWHILE_SPLITS = 8  # summing more partial results costs more than it saves, unless there are many keys
_MANY_KEYS = 8192
_ROWS = (16, 32, 64)  # row tiles that the kernels are compiled for
_FIXED_CLASSES, _FIXED_SETS, _NARROW = 4, 2, 128  # attention_fixed.cuh; the widest values that a warp has alone
_FEW_ROWS, _FEW_HEAD_DIM = 16, 128  # most rows of attend_few, and the head size that has it
_STAGES = 3  # pipeline stages: steps whose keys and values are in shared memory or being copied


@dataclass(frozen=True)
class Sizes:
    """Attributes of ``window_attention``; only ``float8_window_attention`` has scales other than 1."""

    heads: int
    kv_heads: int
    sliding_window: int
    scale: float
    epsilon: float
    key_scale: float = 1.0
    value_scale: float = 1.0
    value_norm: int = 0
    writes: bool = True  # whether the layer has new keys and values

    @property
    def new_heads(self) -> int:
        """The number of heads of new keys, and of new values."""
        return self.kv_heads if self.writes else 0

    @property
    def score_scale(self) -> float:
        """Factor of the scores, the scale of the cached keys included."""
        return self.scale * self.key_scale

    def floats(self, scale: float) -> tuple[np.float32, ...]:
        """Return the float arguments of every kernel, ``scale`` first."""
        return tuple(map(np.float32, (scale, self.epsilon, self.key_scale, self.value_scale)))

    def scalars(self, tokens: int, cache: torch.Tensor, table: torch.Tensor) -> tuple[np.int32, ...]:
        """Return the integer arguments of every kernel.

        ``tokens`` counts those of a window, or of all prompt runs. ``cache`` is [blocks, kv_heads, block_size,
        head_dim], ``table`` [rows, max_blocks].
        """
        sizes = (tokens, self.heads, self.kv_heads, cache.shape[2], table.shape[1], self.sliding_window)
        return tuple(map(np.int32, (*sizes, self.new_heads, self.value_norm)))


@dataclass(frozen=True)
class Plan:
    """Launch plan for the windows of ``batch`` rows, or for all prompt runs as one row.

    Row r of a KV head is token r // group, query head r % group; ``rows`` of them form one tile. ``splits`` thread
    blocks share the keys of a tile: as one cluster if ``clustered``, else through the workspace. ``appends``: the same
    launch writes the new keys and values. ``cached``: bytes of a cache element. ``fixed``: the order of a row's sum
    depends on positions alone, and not on ``splits``. ``few``: a fixed plan of at most 16 rows, which has a kernel of
    its own; where there are clusters it needs ``clustered`` if keys are split.
    """

    batch: int
    kv_heads: int
    head_dim: int
    rows: int
    tiles: int
    splits: int
    clustered: bool
    cached: int = 2
    fixed: bool = False
    few: bool = False

    @classmethod
    def of(
        cls,
        *,
        batch: int,
        query: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        sm_count: int,
        clusters: bool = False,
        splits: int | None = None,
        cached: int = 2,
    ) -> "Plan":
        """Plan windows of ``query`` new tokens per row.

        ``capacity``: positions that a row has room for. ``sm_count``: SMs of the device. ``clusters``:
        whether the device supports thread block clusters. ``splits`` overrides the choice.
        """
        packed = query * (heads // kv_heads)
        rows = next((rows for rows in _ROWS if packed <= rows), _ROWS[-1])
        tiles = -(-packed // rows)
        return cls._cut(batch, kv_heads, head_dim, rows, tiles, capacity, sm_count, clusters, splits, cached)

    @classmethod
    def batch_invariant(
        cls,
        *,
        batch: int,
        query: int,
        largest_query: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        sm_count: int,
        clusters: bool,
        cached: int = 2,
    ) -> "Plan":
        """Plan windows whose tokens have the same bits in every call of up to ``largest_query`` tokens per row.

        The row tile is the same in all of these calls, and the order of a sum is fixed. Otherwise as ``of``.
        """
        if query > largest_query:
            raise ValueError(f"query: 1 to {largest_query} tokens per row are needed, got {query}")
        group = heads // kv_heads
        rows = next((rows for rows in _ROWS if largest_query * group <= rows), _ROWS[-1])
        tiles = -(-query * group // rows)
        share = sm_count // (batch * kv_heads * tiles)
        splits = next((splits for splits in (4, 2) if splits <= share + 1), 1)
        few = query * group <= _FEW_ROWS and head_dim == _FEW_HEAD_DIM
        clustered = clusters and splits > 1
        return cls(batch, kv_heads, head_dim, rows, tiles, splits, clustered, cached, fixed=True, few=few)

    @classmethod
    def of_runs(
        cls,
        *,
        runs: int,
        tokens: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        sm_count: int,
        clusters: bool = False,
        splits: int | None = None,
        cached: int = 2,
    ) -> "Plan":
        """Plan ``runs`` prompt runs of any lengths with ``tokens`` tokens in total; each run begins a tile.

        Otherwise as ``of``.
        """
        rows = _ROWS[-1]
        tiles = -(-tokens * (heads // kv_heads) // rows) + runs - 1
        return cls._cut(1, kv_heads, head_dim, rows, tiles, capacity, sm_count, clusters, splits, cached)

    @classmethod
    def _cut(
        cls,
        batch: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        tiles: int,
        capacity: int,
        sm_count: int,
        clusters: bool,
        splits: int | None,
        cached: int,
    ) -> "Plan":
        if splits is None:
            worthwhile = _WORTHWHILE_SPLITS if capacity < _MANY_KEYS else 2 * _WORTHWHILE_SPLITS
            share = sm_count // (batch * kv_heads * tiles)
            if share == 1 and cached == 1:  # float8 steps are short: one block per SM would leave it waiting
                share = 2
            splits = max(1, min(share, worthwhile, -(-capacity // KEYS)))
        if not 1 <= splits <= MAX_SPLITS:
            raise ValueError(f"splits: 1 to {MAX_SPLITS} are needed, got {splits}")
        return cls(batch, kv_heads, head_dim, rows, tiles, splits, clusters and 1 < splits <= MAX_CLUSTER, cached)

    @property
    def kernel(self) -> str:
        """What the kernel's name begins with, for windows."""
        return "attend_few" if self.few else "attend_fixed" if self.fixed else "attend"

    @property
    def appends(self) -> bool:
        return self.tiles == 1

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory per thread block.

        It holds the keys and values being copied. The same memory later holds the rows of all warps, followed by their
        sums if other blocks read them.
        """
        merged = WARPS * 16 * (self.head_dim + 8)
        if self.fixed and self.splits == 2:
            merged *= _FIXED_SETS
        elif not self.fixed:
            merged += self.rows * self.head_dim
        return max(_STAGES * 2 * KEYS * self.head_dim * self.cached, 4 * merged)

    @property
    def block(self) -> tuple[int, int, int]:
        wide = self.fixed and self.head_dim > _NARROW
        return (2 * BLOCK[0], 1, 1) if wide else BLOCK

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.tiles * self.splits, self.kv_heads, self.batch

    @property
    def cluster(self) -> int:
        """Thread blocks per cluster."""
        return self.splits if self.clustered else 1

    @property
    def shared_rows(self) -> int:
        """Row tiles whose keys are split without a cluster; each needs a ticket."""
        return self.batch * self.kv_heads * self.tiles if self.splits > self.cluster else 0

    @property
    def parts(self) -> int:
        """Rows of partial results."""
        return self.shared_rows * self.splits * (_FIXED_SETS * WARPS * 16 if self.fixed else self.rows)

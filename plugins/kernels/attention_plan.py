"""How the work of ``window_attention`` is cut for one shape of call: row tiles and splits of the keys."""

from dataclasses import dataclass

import numpy as np
import torch

KEYS = 64  # positions a block of threads takes at a time; no block of the cache may end inside
WARPS = 4
BLOCK = (32 * WARPS, 1, 1)  # threads
MAX_SPLITS = 32
MAX_CLUSTER = 8  # blocks that can read each other's shared memory, on every device that has clusters
_WORTHWHILE_SPLITS = 8  # more partial results cost more to sum up than they save, except where keys are many
_MANY_KEYS = 8192
_ROWS = (16, 32, 64)  # row tiles the kernels are compiled for
_LEAST_SPLITS = 2  # where a plan must serve few windows as well as many
_STAGES = 3  # steps whose keys and values are in shared memory or on their way


@dataclass(frozen=True)
class Sizes:
    """The attributes of ``float8_window_attention``; those of ``window_attention`` have scales of 1."""

    heads: int
    kv_heads: int
    sliding_window: int
    scale: float
    epsilon: float
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def score_scale(self) -> float:
        """What products with the keys in the cache are multiplied by."""
        return self.scale * self.key_scale

    def floats(self, scale: float) -> tuple[np.float32, ...]:
        """The floats that every kernel takes, ``scale`` the first of them."""
        return tuple(map(np.float32, (scale, self.epsilon, self.key_scale, self.value_scale)))

    def scalars(self, tokens: int, cache: torch.Tensor, table: torch.Tensor) -> tuple[np.int32, ...]:
        """The integers that every kernel takes: ``tokens`` of a window, or of all runs of prompts; what follows from a
        cache [blocks, kv_heads, block_size, head_dim] and a table [rows, max_blocks]."""
        sizes = (tokens, self.heads, self.kv_heads, cache.shape[2], table.shape[1], self.sliding_window)
        return tuple(map(np.int32, sizes))


@dataclass(frozen=True)
class Plan:
    """The cut of the windows of ``batch`` rows, or of all runs of prompts, as if they were one row.

    Row r of a KV head is token r // group, query head r % group; ``rows`` of them are one tile. ``splits`` blocks of
    threads share the keys of a tile, as one cluster where ``clustered``, else through the workspace. ``appends``: the
    same launch writes the new keys and values. ``cached``: bytes of a number in the cache.
    """

    batch: int
    kv_heads: int
    head_dim: int
    rows: int
    tiles: int
    splits: int
    clustered: bool
    cached: int = 2

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
        processors: int,
        clusters: bool = False,
        splits: int | None = None,
        cached: int = 2,
    ) -> "Plan":
        """Windows of ``query`` new tokens per row. ``capacity``: positions a row has room for; ``processors``: the
        device's; ``clusters``: whether its blocks of threads can be clusters. ``splits`` overrides the choice."""
        packed = query * (heads // kv_heads)
        rows = next((rows for rows in _ROWS if packed <= rows), _ROWS[-1])
        tiles = -(-packed // rows)
        return cls._cut(batch, kv_heads, head_dim, rows, tiles, capacity, processors, clusters, splits, cached)

    @classmethod
    def batch_invariant(
        cls,
        *,
        batch: int,
        query: int,
        largest_batch: int,
        largest_query: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        processors: int,
        clusters: bool,
    ) -> "Plan":
        """As ``of``, by a cut that is the same for any ``batch`` and ``query`` up to the largest, and any capacity: so
        a token's result is the same bits in all of these calls, since a block's share of the keys follows from their
        place in the text alone (attention_block.cuh)."""
        group = heads // kv_heads
        rows = next((rows for rows in _ROWS if largest_query * group <= rows), _ROWS[-1])
        splits = max(_LEAST_SPLITS, min(processors // (largest_batch * kv_heads), _WORTHWHILE_SPLITS))
        return cls(batch, kv_heads, head_dim, rows, -(-query * group // rows), splits, clusters)

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
        processors: int,
        clusters: bool = False,
        splits: int | None = None,
        cached: int = 2,
    ) -> "Plan":
        """``runs`` of prompts that have ``tokens`` tokens together, however these are shared out: each run begins a
        tile. The rest as in ``of``."""
        rows = _ROWS[-1]
        tiles = -(-tokens * (heads // kv_heads) // rows) + runs - 1
        return cls._cut(1, kv_heads, head_dim, rows, tiles, capacity, processors, clusters, splits, cached)

    @classmethod
    def _cut(
        cls,
        batch: int,
        kv_heads: int,
        head_dim: int,
        rows: int,
        tiles: int,
        capacity: int,
        processors: int,
        clusters: bool,
        splits: int | None,
        cached: int,
    ) -> "Plan":
        if splits is None:
            worthwhile = _WORTHWHILE_SPLITS if capacity < _MANY_KEYS else 2 * _WORTHWHILE_SPLITS
            share = processors // (batch * kv_heads * tiles)
            if share == 1 and cached == 1:  # steps of so few bytes leave a processor waiting that has one block
                share = 2
            splits = max(1, min(share, worthwhile, -(-capacity // KEYS)))
        if not 1 <= splits <= MAX_SPLITS:
            raise ValueError(f"splits: 1 to {MAX_SPLITS} are needed, got {splits}")
        return cls(batch, kv_heads, head_dim, rows, tiles, splits, clusters and 1 < splits <= MAX_CLUSTER, cached)

    @property
    def appends(self) -> bool:
        return self.tiles == 1

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory per block of threads: keys and values on their way, then, in their place, the
        rows of all warps and behind them, where other blocks read them, their sums."""
        sums = WARPS * 16 * (self.head_dim + 8) + self.rows * self.head_dim
        return max(_STAGES * 2 * KEYS * self.head_dim * self.cached, 4 * sums)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.tiles * self.splits, self.kv_heads, self.batch

    @property
    def cluster(self) -> int:
        """Blocks of threads per cluster."""
        return self.splits if self.clustered else 1

    @property
    def shared_rows(self) -> int:
        """Row tiles whose keys are split without a cluster: each needs a ticket."""
        return self.batch * self.kv_heads * self.tiles if self.splits > self.cluster else 0

    @property
    def parts(self) -> int:
        """Rows of partial results."""
        return self.shared_rows * self.splits * self.rows

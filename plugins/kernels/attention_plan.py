"""How the work of ``window_attention`` is cut for one shape of call: row tiles, splits of the keys, workspace."""

from dataclasses import dataclass

import torch

KEYS = 64  # positions a block of threads takes at a time; no block of the cache may end inside
WARPS = 4
MAX_SPLITS = 32
_ROWS = (16, 32, 64)  # row tiles the kernels are compiled for
_STAGES = {32: 3, 64: 3, 128: 2}  # keys and values under way at a time, by head size
_RESIDENT = {16: 3, 32: 3, 64: 2}  # blocks of threads that fit a processor's registers, by row tile


@dataclass(frozen=True)
class Processors:
    """What a device offers: streaming multiprocessors, and bytes of shared memory in each."""

    count: int
    shared: int

    @classmethod
    def of(cls, device: torch.device) -> "Processors":
        properties = torch.cuda.get_device_properties(device)
        return cls(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)


@dataclass(frozen=True)
class Plan:
    """The cut for ``query`` new tokens per row.

    Row r of a KV head is token r // group, query head r % group; ``rows`` of them are one tile. ``splits`` blocks of
    threads share the keys of a tile. ``appends``: the same launch writes the new keys and values.
    """

    batch: int
    kv_heads: int
    head_dim: int
    rows: int
    tiles: int
    splits: int

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
        processors: Processors,
        splits: int | None = None,
    ) -> "Plan":
        """``capacity``: positions a row has room for. ``splits`` overrides the choice."""
        packed = query * (heads // kv_heads)
        rows = next((rows for rows in _ROWS if packed <= rows), _ROWS[-1])
        tiles = -(-packed // rows)
        if splits is None:
            resident = min(_RESIDENT[rows], processors.shared // (_shared(head_dim) + 2048))
            slots = processors.count * max(resident, 1)
            splits = min(slots // (batch * kv_heads * tiles), MAX_SPLITS, -(-capacity // KEYS))
        return cls(batch, kv_heads, head_dim, rows, tiles, max(splits, 1))

    @property
    def appends(self) -> bool:
        return self.tiles == 1

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory per block of threads."""
        return _shared(self.head_dim)

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.tiles * self.splits, self.kv_heads, self.batch

    @property
    def shared_rows(self) -> int:
        """Row tiles whose keys are split: each needs a ticket."""
        return self.batch * self.kv_heads * self.tiles if self.splits > 1 else 0

    @property
    def parts(self) -> int:
        """Rows of partial results."""
        return self.shared_rows * self.splits * self.rows


@dataclass(frozen=True)
class Parts:
    """Partial results: ``sums`` float32 [rows, head_dim], ``bounds`` float32 [rows, 2], ``tickets`` int32, zero
    between calls."""

    sums: torch.Tensor
    bounds: torch.Tensor
    tickets: torch.Tensor

    def hold(self, plan: Plan) -> bool:
        return (
            plan.parts * plan.head_dim <= self.sums.numel()
            and plan.parts <= len(self.bounds)
            and plan.shared_rows <= len(self.tickets)
        )


class Workspace:
    """Memory for partial results, shared by calls that run one after the other on one device.

    It grows to the largest plan; calls bound before keep what they were bound to.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._parts = self._allocate(0, 0, 0)

    def parts(self, plan: Plan) -> Parts:
        held = self._parts
        if not held.hold(plan):
            self._parts = self._allocate(
                max(plan.parts * plan.head_dim, held.sums.numel()),
                max(plan.parts, len(held.bounds)),
                max(plan.shared_rows, len(held.tickets)),
            )
        return self._parts

    def _allocate(self, sums: int, bounds: int, tickets: int) -> Parts:
        return Parts(
            torch.empty((sums,), dtype=torch.float32, device=self._device),
            torch.empty((bounds, 2), dtype=torch.float32, device=self._device),
            torch.zeros((tickets,), dtype=torch.int32, device=self._device),
        )


def _shared(head_dim: int) -> int:
    return _STAGES[head_dim] * 2 * KEYS * head_dim * 2

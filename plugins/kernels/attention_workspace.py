"""Memory that calls of ``window_attention`` on one device share: partial results, queries, lengths, what runs see."""

import math
from dataclasses import dataclass

import torch

from tandemrt.plugins.kernels.attention_plan import Plan


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


@dataclass(frozen=True)
class Widened:
    """What runs of prompts see of a cache in float8, in the dtype that is computed in: ``keys`` and ``values``
    [runs * blocks, kv_heads, block_size, head_dim], which ``table`` int32 [runs, blocks] lists in order."""

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor


class Workspace:
    """Memory for partial results, prepared queries, lengths of runs and what they see, shared by calls of one device.

    Such calls must follow one another. It grows to the largest call; calls bound before keep what they were bound to.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._parts = self._allocate(0, 0, 0)
        self._queries = torch.empty(0, dtype=torch.uint8, device=device)
        self._lengths = torch.empty(0, dtype=torch.int32, device=device)
        self._widened = torch.empty(0, dtype=torch.uint8, device=device)

    def queries(self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Room for the prepared queries of prompts, [tokens, heads, head_dim]."""
        size = tokens * heads * head_dim * dtype.itemsize
        if len(self._queries) < size:
            self._queries = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._queries[:size].view(dtype).view(tokens, heads, head_dim)

    def widened(self, runs: int, blocks: int, cache: torch.Tensor, dtype: torch.dtype) -> Widened:
        """Room for ``blocks`` of each of ``runs``, of a ``cache`` [_, kv_heads, block_size, head_dim], in ``dtype``."""
        shape = (2, runs * blocks, *cache.shape[1:])
        size = math.prod(shape) * dtype.itemsize
        if len(self._widened) < size:
            self._widened = torch.empty(size, dtype=torch.uint8, device=self._device)
        keys, values = self._widened[:size].view(dtype).view(shape)
        table = torch.arange(runs * blocks, dtype=torch.int32, device=self._device).view(runs, blocks)
        return Widened(keys, values, table)

    def lengths(self, prompts: int) -> torch.Tensor:
        """Room for what cuDNN asks of runs of prompts, int32 [3, prompts + 1]."""
        size = 3 * (prompts + 1)
        if len(self._lengths) < size:
            self._lengths = torch.empty(size, dtype=torch.int32, device=self._device)
        return self._lengths[:size].view(3, prompts + 1)

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

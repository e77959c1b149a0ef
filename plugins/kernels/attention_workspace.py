"""Scratch memory of ``window_attention`` calls: partial results, queries, run lengths and converted blocks."""

import math
from dataclasses import dataclass

import torch

from tandemrt.plugins.kernels.attention_plan import Plan
from tandemrt.plugins.kernels.attention_wide_plan import WidePlan


@dataclass(frozen=True)
class PartialResults:
    """Partial results of split keys: ``sums`` float32 [rows, head_dim] and ``bounds`` float32 [rows, 2].

    ``tickets`` int32 count the finished splits of each tile; they are zero between calls.
    """

    sums: torch.Tensor
    bounds: torch.Tensor
    tickets: torch.Tensor

    def hold(self, plan: Plan | WidePlan) -> bool:
        return (
            plan.parts * plan.head_dim <= self.sums.numel()
            and plan.parts <= len(self.bounds)
            and plan.shared_rows <= len(self.tickets)
        )


@dataclass(frozen=True)
class ConvertedBlocks:
    """Blocks of a float8 cache that prompt runs attend to, converted to the compute dtype.

    ``keys`` and ``values`` are [runs * blocks, kv_heads, block_size, head_dim]; ``table`` int32 [runs, blocks] lists
    them in order.
    """

    keys: torch.Tensor
    values: torch.Tensor
    table: torch.Tensor


class AttentionWorkspace:
    """Scratch memory of one device, shared by all ``window_attention`` calls of a context.

    Calls that share it must run one after another. It grows to the largest call; calls bound earlier keep their memory.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._parts = self._allocate(0, 0, 0)
        self._queries = torch.empty(0, dtype=torch.uint8, device=device)
        self._lengths = torch.empty(0, dtype=torch.int32, device=device)
        self._converted = torch.empty(0, dtype=torch.uint8, device=device)

    def queries(self, tokens: int, heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
        """Return room for prepared queries of prompts, [tokens, heads, head_dim]."""
        size = tokens * heads * head_dim * dtype.itemsize
        if len(self._queries) < size:
            self._queries = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._queries[:size].view(dtype).view(tokens, heads, head_dim)

    def converted(self, runs: int, blocks: int, cache: torch.Tensor, dtype: torch.dtype) -> ConvertedBlocks:
        """Return room for ``blocks`` per run of a ``cache`` [_, kv_heads, block_size, head_dim], in ``dtype``."""
        shape = (2, runs * blocks, *cache.shape[1:])
        size = math.prod(shape) * dtype.itemsize
        if len(self._converted) < size:
            self._converted = torch.empty(size, dtype=torch.uint8, device=self._device)
        keys, values = self._converted[:size].view(dtype).view(shape)
        table = torch.arange(runs * blocks, dtype=torch.int32, device=self._device).view(runs, blocks)
        return ConvertedBlocks(keys, values, table)

    def lengths(self, prompts: int) -> torch.Tensor:
        """Return room for the run lengths that cuDNN reads, int32 [3, prompts + 1]."""
        size = 3 * (prompts + 1)
        if len(self._lengths) < size:
            self._lengths = torch.empty(size, dtype=torch.int32, device=self._device)
        return self._lengths[:size].view(3, prompts + 1)

    def parts(self, plan: Plan | WidePlan) -> PartialResults:
        parts = self._parts
        if not parts.hold(plan):
            self._parts = self._allocate(
                max(plan.parts * plan.head_dim, parts.sums.numel()),
                max(plan.parts, len(parts.bounds)),
                max(plan.shared_rows, len(parts.tickets)),
            )
        return self._parts

    def _allocate(self, sums: int, bounds: int, tickets: int) -> PartialResults:
        return PartialResults(
            torch.empty((sums,), dtype=torch.float32, device=self._device),
            torch.empty((bounds, 2), dtype=torch.float32, device=self._device),
            torch.zeros((tickets,), dtype=torch.int32, device=self._device),
        )

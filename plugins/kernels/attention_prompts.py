"""Runs of prompts in ``window_attention`` on the GPU: prepared by a kernel, then attended to by cuDNN or another."""

from dataclasses import dataclass

import numpy as np
import torch

from tandemrt.plugins.kernels import cudnn_attention
from tandemrt.plugins.kernels.attention_plan import BLOCK, WARPS, Plan, Sizes
from tandemrt.plugins.kernels.attention_tensors import LayerTensors
from tandemrt.plugins.kernels.attention_workspace import Widened, Workspace
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, current_stream, suffix
from tandemrt.plugins.launch import Call, Context

_HEADS_PER_WARP = 4  # PREPARED of attention_prompts.cuh
_LOG2_E = 1.4426950408889634
_MOST_WIDENED = 1 << 28  # bytes


@dataclass(frozen=True)
class Prompts:
    """The tensors of the runs of a call, checked. ``qkv`` and ``mixed`` begin with the first prompt token."""

    qkv: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    index: torch.Tensor
    table: torch.Tensor
    layer: LayerTensors
    mixed: torch.Tensor

    @property
    def positions(self) -> int:
        """That a run's blocks have room for."""
        return self.table.shape[1] * self.layer.key_cache.shape[2]

    def inputs(self, first: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """What a kernel reads, in its order; ``first``: the projection, or what was made of its queries."""
        return self.layer.inputs(first, self.rows, self.starts, self.index, self.table)


def prompt_calls(prompts: Prompts, sizes: Sizes, context: Context, workspace: Workspace) -> tuple[Call, ...]:
    """Bind what runs of prompts need, in order: prepare queries, write keys and values; then attend.

    cuDNN attends where it serves (cudnn_attention.py), else our own kernel. Of a cache in float8, which cuDNN does not
    read, a kernel widens what the runs see first (of a sliding window what it reaches), if that is no more than
    _MOST_WIDENED; our own reads it as it lies.
    Queries for that are prepared in float16, which its tiles are multiplied in, whatever the dtype of their memory.
    """
    layer, runs = prompts.layer, len(prompts.index)
    queries = workspace.queries(len(prompts.qkv), sizes.heads, layer.key_cache.shape[-1], prompts.qkv.dtype)
    module = context.module(layer.kernels)
    blocks = seen_blocks(prompts.table.shape[1], len(prompts.qkv), sizes.sliding_window, layer.key_cache.shape[2])
    seen = 2 * runs * blocks * layer.key_cache[0].numel() * queries.dtype.itemsize
    serves = cudnn_attention.serves(queries.dtype, queries.shape[-1], prompts.positions)
    if not serves or (layer.in_float8 and seen > _MOST_WIDENED):
        factor = 1.0 if queries.dtype == torch.float32 else sizes.score_scale * _LOG2_E
        splits = 1 if context.batch_invariant else None  # so that no row depends on how many there are
        attention = RunAttention(prompts, queries, sizes, module, workspace, splits)
        return _Preparation(prompts, queries, sizes, module, factor=factor), attention
    lengths = workspace.lengths(runs)
    caches, table, widening = layer.caches, prompts.table, list[Call]()
    if layer.in_float8:
        widened = workspace.widened(runs, blocks, layer.key_cache, queries.dtype)
        caches, table = (widened.keys, widened.values), widened.table
        widening.append(_Widening(prompts, widened, sizes, module))
    library = cudnn_attention.CudnnAttention(
        queries,
        *caches,
        table,
        cudnn_attention.RunLengths.of(lengths, runs),
        prompts.mixed,
        scale=sizes.scale,
        sliding_window=sizes.sliding_window,
        context=context,
    )
    preparation = _Preparation(prompts, queries, sizes, module, factor=sizes.key_scale, lengths=lengths)
    return preparation, *widening, library


def seen_blocks(max_blocks: int, tokens: int, sliding_window: int, block_size: int) -> int:
    """Blocks that a run of at most ``tokens`` sees, in whole tiles of cuDNN's: all ``max_blocks`` of its table, or
    those from the tile on that its ``sliding_window`` begins in."""
    if not sliding_window:
        return max_blocks
    before = cudnn_attention.KEYS - 1 + sliding_window - 1  # positions in front of its first token, at most
    tiles = -(-(before + tokens) // cudnn_attention.KEYS)
    return min(max_blocks, tiles * cudnn_attention.KEYS // block_size)


class _Widening:
    """``widen_<dtype>_<D>``, bound: what runs see of a cache in float8, once their keys and values are in it."""

    def __init__(self, prompts: Prompts, widened: Widened, sizes: Sizes, module: KernelModule) -> None:
        _, kv_heads, _, head_dim = widened.keys.shape
        self._device = widened.keys.device
        self._launch = Launch(
            module.kernel(f"widen_{suffix(widened.keys)}_{head_dim}"),
            (widened.table.shape[1], len(prompts.index), kv_heads),
            BLOCK,
            *prompts.inputs(prompts.qkv),
            *_scalars(prompts, sizes),
            *sizes.floats(1.0),
            widened.keys,
            widened.values,
            *prompts.layer.caches,
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


class _Preparation:
    """``prepare_<dtype>_<D>``, bound. Queries are multiplied by ``factor``; ``lengths`` as in RunLengths, if wanted."""

    def __init__(
        self,
        prompts: Prompts,
        queries: torch.Tensor,
        sizes: Sizes,
        module: KernelModule,
        *,
        factor: float,
        lengths: torch.Tensor | None = None,
    ) -> None:
        tokens, head_dim = len(prompts.qkv), queries.shape[-1]
        warps = tokens * -(-(sizes.heads + 2 * sizes.kv_heads) // _HEADS_PER_WARP)
        self._device = queries.device
        self._launch = Launch(
            module.kernel(f"prepare_{suffix(queries)}_{head_dim}"),
            (-(-warps // WARPS), 1, 1),
            BLOCK,
            *prompts.inputs(prompts.qkv),
            *_scalars(prompts, sizes),
            np.int32(len(prompts.index)),
            *sizes.floats(factor),
            queries,
            *prompts.layer.caches,
            lengths,
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


class RunAttention:
    """``attend_runs_<dtype>_<D>``, bound. Serves every dtype, head size and length of runs."""

    def __init__(
        self,
        prompts: Prompts,
        queries: torch.Tensor,
        sizes: Sizes,
        module: KernelModule,
        workspace: Workspace,
        splits: int | None,
    ) -> None:
        tokens, head_dim = len(prompts.qkv), queries.shape[-1]
        kernel = f"attend_runs_{suffix(queries)}_{head_dim}"
        inputs, scalars = prompts.inputs(queries), _scalars(prompts, sizes)
        floats = sizes.floats(sizes.score_scale)
        outputs = (prompts.mixed, *prompts.layer.caches)
        self._device = queries.device
        if queries.dtype == torch.float32:
            grid = (-(-tokens * sizes.heads // WARPS), 1, 1)
            self._launch = Launch(module.kernel(kernel), grid, BLOCK, *inputs, *scalars, *floats, *outputs)
            return
        plan = Plan.of_runs(
            runs=len(prompts.index),
            tokens=tokens,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=head_dim,
            capacity=prompts.positions,
            processors=module.processors,
            clusters=module.architecture >= HOPPER,
            splits=splits,
            cached=prompts.layer.key_cache.element_size(),
        )
        parts = workspace.parts(plan)
        self._launch = Launch(
            module.kernel(kernel, shared=plan.shared),
            plan.grid,
            BLOCK,
            *inputs,
            *scalars,
            np.int32(len(prompts.index)),
            np.int32(plan.splits),
            *floats,
            *outputs,
            parts.sums,
            parts.bounds,
            parts.tickets,
            shared=plan.shared,
            cluster=plan.cluster,
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


def _scalars(prompts: Prompts, sizes: Sizes) -> tuple[np.int32, ...]:
    return sizes.scalars(len(prompts.qkv), prompts.layer.key_cache, prompts.table)

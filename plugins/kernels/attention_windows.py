"""Windows of equally many tokens per row in ``window_attention`` on the GPU."""

from dataclasses import dataclass

import numpy as np
import torch

from tandemrt.plugins.kernels.attention_plan import BLOCK, WARPS, Plan, Sizes
from tandemrt.plugins.kernels.attention_tensors import LayerTensors
from tandemrt.plugins.kernels.attention_workspace import Workspace
from tandemrt.plugins.kernels.module import HOPPER, Launch, suffix
from tandemrt.plugins.launch import Context


@dataclass(frozen=True)
class Windows:
    """The tensors of the windows of a call, checked; ``qkv`` and ``mixed`` may go on behind them."""

    qkv: torch.Tensor
    table: torch.Tensor
    index: torch.Tensor
    layer: LayerTensors
    mixed: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """What a kernel reads, in its order."""
        return self.layer.inputs(self.qkv, self.table, self.index)


def window_launches(
    windows: Windows, query: int, sizes: Sizes, context: Context, workspace: Workspace, splits: int | None
) -> tuple[Launch, ...]:
    """Bind windows of ``query`` tokens per row: one launch, or one that writes keys and values and one that attends.

    ``splits`` overrides how many blocks share a row's keys.
    """
    layer, module = windows.layer, context.module(windows.layer.kernels)
    head_dim = layer.key_cache.shape[-1]
    plan = _plan(windows, query, sizes, context, splits)
    kind = f"{suffix(windows.qkv)}_{head_dim}"
    scalars = sizes.scalars(query, layer.key_cache, windows.table)
    floats = sizes.floats(sizes.score_scale)

    def plainly(name: str, heads: int, *outputs: torch.Tensor) -> Launch:
        """A warp for each token and head."""
        grid = (-(-query * heads // WARPS), len(windows.index), 1)
        return Launch(module.kernel(f"{name}_{kind}"), grid, BLOCK, *windows.inputs, *scalars, *floats, *outputs)

    if windows.qkv.dtype == torch.float32:
        attend = plainly("attend", sizes.heads, windows.mixed, *layer.caches)
        return plainly("append", sizes.kv_heads, *layer.caches), attend
    cut = (np.int32(plan.splits), np.int32(plan.appends))
    parts = workspace.parts(plan)
    attend = Launch(
        module.kernel(f"attend_{kind}_{plan.rows}", shared=plan.shared),
        plan.grid,
        BLOCK,
        *windows.inputs,
        *scalars,
        *cut,
        *floats,
        windows.mixed,
        *layer.caches,
        parts.sums,
        parts.bounds,
        parts.tickets,
        shared=plan.shared,
        cluster=plan.cluster,
    )
    return (attend,) if plan.appends else (plainly("append", sizes.kv_heads, *layer.caches), attend)


def _plan(windows: Windows, query: int, sizes: Sizes, context: Context, splits: int | None) -> Plan:
    layer, module = windows.layer, context.module(windows.layer.kernels)
    given = {
        "batch": len(windows.index),
        "query": query,
        "heads": sizes.heads,
        "kv_heads": sizes.kv_heads,
        "head_dim": layer.key_cache.shape[-1],
        "processors": module.processors,
    }
    clusters = module.architecture >= HOPPER
    if context.batch_invariant:
        if splits is not None:
            raise ValueError(f"splits: a batch-invariant plan has its own, None is needed, got {splits}")
        largest = {"largest_batch": context.sizes["batch"], "largest_query": context.sizes["window+1"]}
        return Plan.batch_invariant(**given, **largest, clusters=clusters)
    capacity, cached = windows.table.shape[1] * layer.key_cache.shape[2], layer.key_cache.element_size()
    return Plan.of(**given, capacity=capacity, clusters=clusters, splits=splits, cached=cached)

"""Draft windows (one length for all rows) of ``window_attention`` on a GPU."""

from dataclasses import dataclass

import numpy as np
import torch

from tandemrt.plugins.kernels.attention_plan import BLOCK, WARPS, Plan, Sizes
from tandemrt.plugins.kernels.attention_tensors import LayerTensors
from tandemrt.plugins.kernels.attention_wide_plan import WIDE_BLOCK, WidePlan, is_wide
from tandemrt.plugins.kernels.attention_workspace import AttentionWorkspace
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, suffix
from tandemrt.plugins.operators.launch import Context


@dataclass(frozen=True)
class WindowTensors:
    """Validated tensors of a call's windows; ``qkv`` and ``mixed`` may have prompt tokens after them."""

    qkv: torch.Tensor
    table: torch.Tensor
    index: torch.Tensor
    layer: LayerTensors
    mixed: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that a kernel reads, in its order."""
        return self.layer.inputs(self.qkv, self.table, self.index)


def window_launches(
    windows: WindowTensors,
    query: int,
    sizes: Sizes,
    context: Context,
    workspace: AttentionWorkspace,
    *,
    splits: int | None,
    after_prompts: bool,
) -> tuple[Launch, ...]:
    """Bind windows of ``query`` tokens per row.

    The result is one launch, or one that writes keys and values and one that attends. ``splits`` overrides the number
    of thread blocks that share a row's keys. ``after_prompts``: the call's prompts write keys that windows may read.
    """
    layer, module = windows.layer, KernelModule.of(context, windows.layer.kernels)
    head_dim = layer.key_cache.shape[-1]
    plan = _plan(windows, query, sizes, context, splits)
    kind = f"{suffix(windows.qkv)}_{head_dim}"
    scalars = sizes.scalars(query, layer.key_cache, windows.table)
    floats = sizes.floats(sizes.score_scale)

    def warp_per_head(name: str, heads: int, *outputs: torch.Tensor) -> Launch:
        """Bind a launch with one warp per token and head."""
        grid = (-(-query * heads // WARPS), len(windows.index), 1)
        return Launch(module.kernel(f"{name}_{kind}"), grid, BLOCK, *windows.inputs, *scalars, *floats, *outputs)

    append = (warp_per_head("append", sizes.new_heads, *layer.caches),) if sizes.writes else ()
    if windows.qkv.dtype == torch.float32:
        return *append, warp_per_head("attend", sizes.heads, windows.mixed, *layer.caches)
    if isinstance(plan, WidePlan):
        return *append, _wide_launch(windows, query, sizes, module, workspace, plan)
    appends = plan.appends and sizes.writes
    cut = (np.int32(plan.splits), np.int32(appends))
    parts = workspace.parts(plan)
    attend = Launch(
        module.kernel(f"{plan.kernel}_{kind}_{plan.rows}", shared=plan.shared),
        plan.grid,
        plan.block,
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
        early=plan.fixed and appends and not after_prompts and module.architecture >= HOPPER,
    )
    return (attend,) if appends else (*append, attend)


def _wide_launch(
    windows: WindowTensors,
    query: int,
    sizes: Sizes,
    module: KernelModule,
    workspace: AttentionWorkspace,
    plan: WidePlan,
) -> Launch:
    """Bind attention of wide heads, whose new keys and values are in the cache."""
    parts = workspace.parts(plan)
    return Launch(
        module.kernel(f"attend_{suffix(windows.qkv)}_{plan.head_dim}_{plan.rows}", shared=plan.shared),
        plan.grid,
        WIDE_BLOCK,
        *windows.inputs,
        *sizes.scalars(query, windows.layer.key_cache, windows.table),
        np.int32(plan.splits),
        np.int32(plan.buffers),
        *sizes.floats(sizes.score_scale),
        windows.mixed,
        *windows.layer.caches,
        parts.sums,
        parts.bounds,
        parts.tickets,
        shared=plan.shared,
    )


def _plan(windows: WindowTensors, query: int, sizes: Sizes, context: Context, splits: int | None) -> Plan | WidePlan:
    layer, module = windows.layer, KernelModule.of(context, windows.layer.kernels)
    batch, head_dim, clusters = len(windows.index), layer.key_cache.shape[-1], module.architecture >= HOPPER
    if context.batch_invariant and splits is not None:
        raise ValueError(f"splits: a batch-invariant plan has its own, None is needed, got {splits}")
    if is_wide(windows.qkv.dtype, head_dim):
        return WidePlan.of_windows(
            batch=batch,
            lines=query * sizes.heads // sizes.kv_heads,
            kv_heads=sizes.kv_heads,
            sm_count=module.sm_count,
            shared_memory=module.shared_memory,
            splits=splits,
        )
    if context.batch_invariant:
        return Plan.batch_invariant(
            batch=batch,
            query=query,
            largest_query=context.sizes["window+1"],
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=head_dim,
            sm_count=module.sm_count,
            clusters=clusters,
            cached=layer.key_cache.element_size(),
        )
    return Plan.of(
        batch=batch,
        query=query,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=head_dim,
        capacity=windows.table.shape[1] * layer.key_cache.shape[2],
        sm_count=module.sm_count,
        clusters=clusters,
        splits=splits,
        cached=layer.key_cache.element_size(),
    )

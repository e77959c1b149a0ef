"""Windows of equally many tokens per row in ``window_attention`` on the GPU."""

from dataclasses import dataclass

import numpy as np
import torch

from tandemrt.plugins.kernels.attention_plan import BLOCK, WARPS, Plan, Sizes, Workspace
from tandemrt.plugins.kernels.module import KernelModule, Launch, suffix


@dataclass(frozen=True)
class Windows:
    """The tensors of the windows of a call, checked; ``qkv`` and ``mixed`` may go on behind them."""

    qkv: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    write_index: torch.Tensor
    cosine: torch.Tensor
    sine: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    mixed: torch.Tensor

    @property
    def caches(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key_cache, self.value_cache

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """What a kernel reads, in its order."""
        place = (self.block_table, self.write_index)
        return (self.qkv, *self.caches, *place, self.cosine, self.sine, self.q_norm, self.k_norm)


def window_launches(
    windows: Windows, query: int, sizes: Sizes, module: KernelModule, workspace: Workspace, splits: int | None
) -> tuple[Launch, ...]:
    """Bind windows of ``query`` tokens per row: one launch, or one that writes keys and values and one that attends.

    ``splits`` overrides how many blocks share a row's keys.
    """
    batch, head_dim = len(windows.write_index), windows.key_cache.shape[-1]
    plan = Plan.of(
        batch=batch,
        query=query,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_dim=head_dim,
        capacity=windows.block_table.shape[1] * windows.key_cache.shape[2],
        processors=torch.cuda.get_device_properties(windows.qkv.device).multi_processor_count,
        clusters=module.architecture >= 90,
        splits=splits,
    )
    kind = f"{suffix(windows.qkv)}_{head_dim}"
    scalars = sizes.scalars(query, windows.key_cache, windows.block_table)
    floats = (np.float32(sizes.scale), np.float32(sizes.epsilon))

    def plainly(name: str, heads: int, *outputs: torch.Tensor) -> Launch:
        """A warp for each token and head."""
        grid = (-(-query * heads // WARPS), batch, 1)
        return Launch(module.kernel(f"{name}_{kind}"), grid, BLOCK, *windows.inputs, *scalars, *floats, *outputs)

    if windows.qkv.dtype == torch.float32:
        attend = plainly("attend", sizes.heads, windows.mixed, *windows.caches)
        return plainly("append", sizes.kv_heads, *windows.caches), attend
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
        *windows.caches,
        parts.sums,
        parts.bounds,
        parts.tickets,
        shared=plan.shared,
        cluster=plan.cluster,
    )
    return (attend,) if plan.appends else (plainly("append", sizes.kv_heads, *windows.caches), attend)

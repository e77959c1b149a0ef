"""Prompt runs of ``window_attention`` on a GPU: prepare queries and cache, then attend with cuDNN or our kernel."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from tandemrt.plugins.kernels import cudnn_attention
from tandemrt.plugins.kernels.attention_plan import BLOCK, WARPS, Plan, Sizes
from tandemrt.plugins.kernels.attention_tensors import LayerTensors
from tandemrt.plugins.kernels.attention_wide_plan import WIDE_BLOCK, WidePlan, is_wide
from tandemrt.plugins.kernels.attention_workspace import AttentionWorkspace, ConvertedBlocks
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, current_stream, suffix
from tandemrt.plugins.operators.constants import IMAGE_ATTENTION_KERNELS
from tandemrt.plugins.operators.launch import Call, Context

_HEADS_PER_WARP = 4  # PREPARED of attention_prompts.cuh
_LOG2_E = 1.4426950408889634
_MAX_CONVERTED_BYTES = 1 << 28  # bytes


@dataclass(frozen=True)
class PromptTensors:
    """Validated tensors of a call's prompt runs; those of tokens begin with the first prompt token."""

    qkv: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    index: torch.Tensor
    table: torch.Tensor
    layer: LayerTensors
    mixed: torch.Tensor
    image_ends: torch.Tensor | None = None

    @property
    def positions(self) -> int:
        """Number of positions in the blocks of a run."""
        return self.table.shape[1] * self.layer.key_cache.shape[2]

    def runs(self, first: int, end: int) -> "PromptTensors":
        """Return the tensors of the runs from ``first`` up to ``end``."""
        part = slice(first, end)
        return replace(self, starts=self.starts[first : end + 1], index=self.index[part], table=self.table[part])

    def inputs(self, first: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the tensors that a kernel reads, in its order; ``first`` is the projection or the prepared queries."""
        return self.layer.inputs(first, self.rows, self.starts, self.index, self.table)


def prompt_calls(
    prompts: PromptTensors, sizes: Sizes, context: Context, workspace: AttentionWorkspace
) -> tuple[Call, ...]:
    """Bind the calls of the prompt runs, in order: prepare queries, write keys and values, then attend.

    cuDNN attends if it supports the call (cudnn_attention.py), else our kernel, which alone lets tokens of an image see
    later ones. cuDNN cannot read a float8 cache: a kernel first converts the blocks that some runs attend to, at most
    _MAX_CONVERTED_BYTES at a time. If those of one run take more, our kernel attends. It reads float8 directly and
    computes in float16 tiles; it reads its queries as float16, whatever their dtype.
    """
    layer, runs = prompts.layer, len(prompts.index)
    queries = workspace.queries(len(prompts.qkv), sizes.heads, layer.key_cache.shape[-1], prompts.qkv.dtype)
    module = KernelModule.of(context, layer.kernels)
    # for batch invariance, neither the kernel nor its plan depends on the tokens of this call
    most = context.sizes["query"] if context.batch_invariant else len(prompts.qkv)
    blocks = seen_blocks(prompts.table.shape[1], most, sizes.sliding_window, layer.key_cache.shape[2])
    at_once = _MAX_CONVERTED_BYTES // (2 * blocks * layer.key_cache[0].numel() * queries.dtype.itemsize)
    form = (queries.dtype, queries.shape[-1], prompts.positions)
    serves = cudnn_attention.serves(*form, sinks=layer.sinks is not None)
    if not serves or prompts.image_ends is not None or (layer.in_float8 and not at_once):
        factor = 1.0 if queries.dtype == torch.float32 else sizes.score_scale * _LOG2_E
        splits = 1 if context.batch_invariant else None  # so that no row depends on the number of runs
        attending = module if prompts.image_ends is None else KernelModule.of(context, IMAGE_ATTENTION_KERNELS)
        attention = RunAttention(prompts, queries, sizes, attending, workspace, splits)
        return _Preparation(prompts, queries, sizes, module, factor=factor), attention
    lengths = workspace.lengths(runs)
    calls: list[Call] = [_Preparation(prompts, queries, sizes, module, factor=sizes.key_scale, lengths=lengths)]
    step = min(runs, at_once) if layer.in_float8 else runs
    for first in range(0, runs, step):
        part = prompts.runs(first, min(first + step, runs))
        caches, table = layer.caches, part.table
        if layer.in_float8:
            converted = workspace.converted(len(part.index), blocks, layer.key_cache, queries.dtype)
            caches, table = (converted.keys, converted.values), converted.table
            calls.append(_BlockConversion(part, converted, sizes, module))
        library = cudnn_attention.CudnnAttention(
            queries,
            *caches,
            table,
            cudnn_attention.RunLengths.of(lengths, first, len(part.index)),
            prompts.mixed,
            scale=sizes.scale,
            sliding_window=sizes.sliding_window,
            sinks=layer.sinks,
            context=context,
        )
        calls.append(library)
    return tuple(calls)


def seen_blocks(max_blocks: int, tokens: int, sliding_window: int, block_size: int) -> int:
    """Return the number of blocks that a run of at most ``tokens`` attends to, rounded up to cuDNN's tiles.

    These are all ``max_blocks`` of its table, or those from the tile in which its ``sliding_window`` begins.
    """
    if not sliding_window:
        return max_blocks
    before = cudnn_attention.KEYS - 1 + sliding_window - 1  # most positions before its first token
    tiles = -(-(before + tokens) // cudnn_attention.KEYS)
    return min(max_blocks, tiles * cudnn_attention.KEYS // block_size)


class _BlockConversion:
    """Bound kernel ``widen_<dtype>_<D>``: converts the blocks that runs attend to, new keys and values included."""

    def __init__(self, prompts: PromptTensors, converted: ConvertedBlocks, sizes: Sizes, module: KernelModule) -> None:
        _, kv_heads, _, head_dim = converted.keys.shape
        self._device = converted.keys.device
        self._launch = Launch(
            module.kernel(f"widen_{suffix(converted.keys)}_{head_dim}"),
            (converted.table.shape[1], len(prompts.index), kv_heads),
            BLOCK,
            *prompts.inputs(prompts.qkv),
            *_scalars(prompts, sizes),
            *sizes.floats(1.0),
            converted.keys,
            converted.values,
            *prompts.layer.caches,
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


class _Preparation:
    """Bound kernel ``prepare_<dtype>_<D>``: scales queries by ``factor``; writes ``lengths`` (RunLengths) if given."""

    def __init__(
        self,
        prompts: PromptTensors,
        queries: torch.Tensor,
        sizes: Sizes,
        module: KernelModule,
        *,
        factor: float,
        lengths: torch.Tensor | None = None,
    ) -> None:
        tokens, head_dim = len(prompts.qkv), queries.shape[-1]
        warps = tokens * -(-(sizes.heads + 2 * sizes.new_heads) // _HEADS_PER_WARP)
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
    """Bound kernel ``attend_runs_<dtype>_<D>``, for every dtype, head size and run length, or ``attend_images_...``."""

    def __init__(
        self,
        prompts: PromptTensors,
        queries: torch.Tensor,
        sizes: Sizes,
        module: KernelModule,
        workspace: AttentionWorkspace,
        splits: int | None,
    ) -> None:
        tokens, runs, head_dim = len(prompts.qkv), len(prompts.index), queries.shape[-1]
        inputs, scalars = prompts.inputs(queries), _scalars(prompts, sizes)
        kernel = f"attend_runs_{suffix(queries)}_{head_dim}"
        if prompts.image_ends is not None:
            kernel, inputs = kernel.replace("runs", "images"), (*inputs, prompts.image_ends)
        floats = sizes.floats(sizes.score_scale)
        outputs = (prompts.mixed, *prompts.layer.caches)
        self._device = queries.device
        if is_wide(queries.dtype, head_dim):
            lines, memory = tokens * sizes.heads // sizes.kv_heads, module.shared_memory
            wide = WidePlan.of_runs(runs=runs, lines=lines, kv_heads=sizes.kv_heads, shared_memory=memory)
            attend, numbers = module.kernel(f"{kernel}_{wide.rows}", shared=wide.shared), (runs, wide.buffers)
            arguments = (*inputs, *scalars, *map(np.int32, numbers), *floats, *outputs)
            self._launch = Launch(attend, wide.grid, WIDE_BLOCK, *arguments, shared=wide.shared)
            return
        if queries.dtype == torch.float32:
            grid = (-(-tokens * sizes.heads // WARPS), 1, 1)
            self._launch = Launch(module.kernel(kernel), grid, BLOCK, *inputs, *scalars, *floats, *outputs)
            return
        plan = Plan.of_runs(
            runs=runs,
            tokens=tokens,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head_dim=head_dim,
            capacity=prompts.positions,
            sm_count=module.sm_count,
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
            np.int32(runs),
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


def _scalars(prompts: PromptTensors, sizes: Sizes) -> tuple[np.int32, ...]:
    return sizes.scalars(len(prompts.qkv), prompts.layer.key_cache, prompts.table)

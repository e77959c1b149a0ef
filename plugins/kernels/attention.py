"""``window_attention`` and ``float8_window_attention`` on a GPU."""

from collections.abc import Mapping
from typing import Any

import torch

from tandemrt.engines.contract.dtypes import KERNEL_SUFFIX
from tandemrt.plugins.kernels.attention_plan import KEYS, Sizes
from tandemrt.plugins.kernels.attention_prompts import PromptTensors, prompt_calls
from tandemrt.plugins.kernels.attention_tensors import LayerTensors
from tandemrt.plugins.kernels.attention_wide_plan import is_wide
from tandemrt.plugins.kernels.attention_windows import WindowTensors, window_launches
from tandemrt.plugins.kernels.attention_workspace import AttentionWorkspace
from tandemrt.plugins.kernels.module import Launch, Tensors, run_in_order
from tandemrt.plugins.kernels.tensors import check, check_packed
from tandemrt.plugins.operators.constants import HEAD_DIMS
from tandemrt.plugins.operators.launch import Call, Context


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "AttentionLauncher":
    """Bind the operator; see Launcher in plugins/operators/launch.py."""
    return AttentionLauncher(
        context,
        tensors["qkv"],
        tensors["key_cache"],
        tensors["value_cache"],
        tensors["block_table"],
        tensors["write_index"],
        tensors["prompt_rows"],
        tensors["prompt_starts"],
        tensors["prompt_index"],
        tensors["prompt_table"],
        tensors["cosine"],
        tensors["sine"],
        tensors.get("q_norm"),
        tensors.get("k_norm"),
        tensors.get("sinks"),
        tensors.get("image_ends"),
        tensors["mixed"],
        **attributes,
    )


class AttentionLauncher:
    """One bound call of ``window_attention``; shapes as in ``tandemrt.plugins.reference.window_attention``.

    All tensors are contiguous and on the context's device. They share one dtype (bfloat16 or float16; float32 is slow),
    except index tensors and caches in float8_e4m3fn. A run updates the caches in place and writes ``mixed``; rows of
    padding keep their contents. A cache block holds a multiple of 64 positions, unless a row has only one block. Wide
    heads ignore ``image_ends``; no model has images that attend both ways there.
    ``splits`` overrides the number of thread blocks that share a window's keys.

    Calls of one context must run one after another. Capturable: a run allocates nothing and reads nothing on the host.
    A captured run serves any tables, any lengths, and any prompt runs of the same number of runs and tokens.
    """

    def __init__(
        self,
        context: Context,
        qkv: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_table: torch.Tensor,
        write_index: torch.Tensor,
        prompt_rows: torch.Tensor,
        prompt_starts: torch.Tensor,
        prompt_index: torch.Tensor,
        prompt_table: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        sinks: torch.Tensor | None,
        image_ends: torch.Tensor | None,
        mixed: torch.Tensor,
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        epsilon: float = 1e-6,
        sliding_window: int = 0,
        value_norm: int = 0,
        key_scale: float = 1.0,
        value_scale: float = 1.0,
        splits: int | None = None,
    ) -> None:
        blocks, _, block_size, head_dim = key_cache.shape
        tokens, batch = len(qkv), len(write_index)
        windows = tokens - len(prompt_rows)
        max_blocks, positions, half = block_table.shape[1], len(cosine), head_dim // 2
        writes = qkv.shape[1] != heads * head_dim
        check("qkv", qkv, qkv.dtype, (tokens, (heads + 2 * kv_heads * writes) * head_dim))
        cached = torch.float8_e4m3fn if key_cache.dtype == torch.float8_e4m3fn else qkv.dtype
        check("key_cache", key_cache, cached, (blocks, kv_heads, block_size, head_dim))
        check("value_cache", value_cache, cached, (blocks, kv_heads, block_size, head_dim))
        check("cosine", cosine, qkv.dtype, (positions, half))
        check("sine", sine, qkv.dtype, (positions, half))
        check("mixed", mixed, qkv.dtype, (tokens, heads * head_dim))
        for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
            if norm is not None:
                check(name, norm, qkv.dtype, (head_dim,))
        if sinks is not None:
            check("sinks", sinks, torch.float32, (heads,))
        if image_ends is not None:
            check("image_ends", image_ends, torch.int64, (tokens,))
            if cached != qkv.dtype:
                raise ValueError("image_ends: there are no kernels for a cache in float8")
        _check_sizes(heads, kv_heads, head_dim, block_size, max_blocks, qkv.dtype, (q_norm is None, k_norm is None))
        place = {"block_table": block_table, "write_index": write_index, "prompt_rows": prompt_rows}
        place |= {"prompt_starts": prompt_starts, "prompt_index": prompt_index, "prompt_table": prompt_table}
        check_packed("qkv", tokens, place)

        self._device = qkv.device
        self._prompts: tuple[Call, ...] = ()
        self._windows: tuple[Launch, ...] = ()
        workspace = context.get_or_create("window_attention", lambda: AttentionWorkspace(context.device))
        scales = (scale, epsilon, key_scale, value_scale)
        sizes = Sizes(heads, kv_heads, sliding_window, *scales, value_norm=value_norm, writes=writes)
        layer = LayerTensors(key_cache, value_cache, cosine, sine, q_norm, k_norm, sinks)
        if windows < tokens:
            runs = PromptTensors(
                qkv[windows:],
                prompt_rows,
                prompt_starts,
                prompt_index,
                prompt_table,
                layer,
                mixed[windows:],
                None if image_ends is None or is_wide(qkv.dtype, head_dim) else image_ends[windows:],
            )
            self._prompts = prompt_calls(runs, sizes, context, workspace)
        if windows:
            rows, query = WindowTensors(qkv, block_table, write_index, layer, mixed), windows // batch
            self._windows = window_launches(
                rows, query, sizes, context, workspace, splits=splits, after_prompts=windows < tokens
            )

    def run(self) -> None:
        """Enqueue on torch's current stream: prompts first, because windows may follow them in the same text."""
        for call in self._prompts:
            call.run()
        run_in_order(self._windows, self._device)


def _check_sizes(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    max_blocks: int,
    dtype: torch.dtype,
    no_norm: tuple[bool, bool],
) -> None:
    if str(dtype).removeprefix("torch.") not in KERNEL_SUFFIX:
        raise ValueError(f"qkv: one of {', '.join(KERNEL_SUFFIX)} is needed, got {dtype}")
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim: one of {HEAD_DIMS} is needed, got {head_dim}")
    if heads < 1 or heads % kv_heads:
        raise ValueError(f"heads: a multiple of the {kv_heads} KV heads is needed, got {heads}")
    if block_size % KEYS and max_blocks > 1:
        raise ValueError(f"block_size: a multiple of {KEYS} is needed where a row has several, got {block_size}")
    if len(set(no_norm)) > 1:
        raise ValueError("q_norm, k_norm: both or neither are needed")

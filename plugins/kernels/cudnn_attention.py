"""Prefill attention by cuDNN over a paged cache.

cuDNN is faster than our kernel for runs of many tokens and slower for draft windows, so it serves prompts only. It
needs the package nvidia-cudnn-frontend, which uses the cuDNN of torch; without it our kernel attends. The graph
is the scaled dot-product attention of cuDNN's documentation (operations/Attention): a padding mask for runs of
different lengths, ragged offsets for packed runs, block tables for the cache, and a causal mask aligned to the bottom
right.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tandemrt.engines.validation.extras import pip_install
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.tensors.devices.lookup import device_of

OLDEST, OLDEST_WITH_SINKS = 90_500, 91_300  # the first versions with paged caches, and with sinks
DTYPES = (torch.bfloat16, torch.float16)
_LONGEST = 2048  # tokens of a run that every plan serves
KEYS = 128  # keys per tile; attention_prompts.cuh depends on it


@cache
def unavailable(*, sinks: bool = False) -> str | None:
    """Return why cuDNN attention, or that with ``sinks``, is not available on this machine; None: it is."""
    try:
        import cudnn
    except ImportError as error:
        return f"nvidia-cudnn-frontend is not installed ({error}); {pip_install('cuda')}"
    version = int(cudnn.backend_version())
    if version < (OLDEST_WITH_SINKS if sinks else OLDEST):
        return f"cuDNN {version} is older than {OLDEST}; install a newer torch"
    return None


@dataclass(frozen=True)
class RunLengths:
    """Lengths of packed runs that cuDNN reads, int32 on the device.

    ``queries`` and ``keys`` [prompts]: new tokens of each run, and all tokens of its text in the cache. ``offsets``
    [prompts + 1]: the first element of each run in the queries.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, lengths: torch.Tensor, first: int, prompts: int) -> "RunLengths":
        """Return those of ``prompts`` runs from ``first`` on.

        ``lengths``: int32 [3, all runs + 1], as ``prepare`` writes them (attention_prompts.cuh).
        """
        queries, keys, offsets = lengths[:, first:]
        return cls(queries[:prompts], keys[:prompts], offsets[: prompts + 1])


class CudnnAttention:
    """One bound call. Capturable: a run allocates nothing and reads nothing on the host.

    ``queries`` [tokens, heads, head_dim] are normed and rotated. The caches [blocks, kv_heads, block_size, head_dim]
    hold the new keys and values. ``table`` is int32 [prompts, max_blocks]. A run writes ``mixed`` [tokens, heads *
    head_dim]; rows without a run keep their contents. An empty run costs nothing. ``sinks``: float32 [heads], further
    logits of every softmax, or None. Call ``serves`` first.
    """

    def __init__(
        self,
        queries: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        table: torch.Tensor,
        lengths: RunLengths,
        mixed: torch.Tensor,
        *,
        scale: float,
        sliding_window: int,
        sinks: torch.Tensor | None,
        context: Context,
    ) -> None:
        import cudnn

        self._device = context.device
        self._set_stream = cudnn.set_stream
        self._handle = context.get_or_create("cudnn", lambda: _handle(context.device))
        # Ragged offsets locate each run, so one plan serves all calls with shorter runs at no extra cost.
        longest = longest_run(len(queries), context)
        how = (scale, sliding_window, sinks is not None)
        self._plan = context.get_or_create(
            ("cudnn", queries.dtype, queries.shape[1:], longest, key_cache.shape, table.shape, how),
            lambda: _Plan.build(self._handle, queries, longest, key_cache, table, *how),
        )
        tensors = [queries, key_cache, value_cache, table, table]
        tensors += [lengths.queries, lengths.keys, lengths.offsets, *([] if sinks is None else [sinks]), mixed]
        self._tensors = dict(zip(self._plan.tensors, tensors, strict=True))

    def run(self) -> None:
        """Enqueue the call on torch's current stream."""
        self._set_stream(handle=self._handle, stream=device_of(self._device).current_stream())
        self._plan.graph.execute(self._tensors, self._plan.workspace, handle=self._handle)


def serves(dtype: torch.dtype, head_dim: int, positions: int, *, sinks: bool = False) -> bool:
    """Return whether cuDNN supports ``dtype``, heads of ``head_dim``, block tables of ``positions`` and ``sinks``.

    cuDNN reads whole tiles of keys, so it would read beyond the end of a table that ends within a tile.
    """
    fits = dtype in DTYPES and head_dim % 8 == 0 and head_dim <= 256 and not positions % KEYS
    return fits and unavailable(sinks=sinks) is None


def longest_run(tokens: int, context: Context) -> int:
    """Return the longest run that a plan serves: one value for all calls of a context with sizes, else ``tokens``.

    So the plan does not depend on the other runs, and a bundle builds it when it opens. Shorter runs cost nothing.
    """
    most = context.sizes.get("query", tokens)
    return max(_LONGEST, 1 << (most - 1).bit_length())


@dataclass(frozen=True)
class _Plan:
    """``tensors``: queries, caches, the table twice, lengths of queries and keys, offsets, sinks if any, result."""

    graph: Any
    tensors: tuple[Any, ...]
    workspace: torch.Tensor

    @classmethod
    def build(
        cls,
        handle: Any,
        queries: torch.Tensor,
        longest: int,
        cache: torch.Tensor,
        table: torch.Tensor,
        scale: float,
        sliding_window: int,
        with_sinks: bool,
    ) -> "_Plan":
        """Build the plan for these shapes and dtypes, any number of tokens, and runs of at most ``longest``."""
        import cudnn

        kind = cudnn.data_type.BFLOAT16 if queries.dtype == torch.bfloat16 else cudnn.data_type.HALF
        whole, single = cudnn.data_type.INT32, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=single, compute_data_type=single, handle=handle)

        def tensor(name: str, shape: tuple[int, ...], data_type: Any = kind) -> Any:
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            return graph.tensor(name=name, dim=list(shape), stride=strides, data_type=data_type)

        (_, heads, head_dim), (prompts, blocks) = queries.shape, table.shape
        # cuDNN orders [batch, heads, tokens, head_dim]. It ignores the batch stride, because offsets locate the runs.
        shape, strides = (
            [prompts, heads, longest, head_dim],
            [longest * heads * head_dim, head_dim, heads * head_dim, 1],
        )
        query = graph.tensor(name="queries", dim=shape, stride=strides, data_type=kind)
        keys, values = tensor("keys", tuple(cache.shape)), tensor("values", tuple(cache.shape))
        key_table, value_table = (tensor(name, (prompts, 1, blocks, 1), whole) for name in ("key_table", "value_table"))
        lengths = [tensor(name, (prompts, 1, 1, 1), whole) for name in ("query_lengths", "key_lengths")]
        offsets = tensor("offsets", (prompts + 1, 1, 1, 1), whole)
        query.set_ragged_offset(offsets)
        sinks = [tensor("sinks", (1, heads, 1, 1), single)] if with_sinks else []
        window = {"diagonal_band_left_bound": sliding_window} if sliding_window else {}
        mixed, _ = graph.sdpa(
            name="attention",
            q=query,
            k=keys,
            v=values,
            generate_stats=False,
            attn_scale=scale,
            use_padding_mask=True,
            seq_len_q=lengths[0],
            seq_len_kv=lengths[1],
            paged_attention_k_table=key_table,
            paged_attention_v_table=value_table,
            paged_attention_max_seq_len_kv=blocks * cache.shape[2],
            diagonal_alignment=cudnn.diagonal_alignment.BOTTOM_RIGHT,
            diagonal_band_right_bound=0,
            **window,
            **({"sink_token": sinks[0]} if sinks else {}),
        )
        mixed.set_output(True).set_dim(shape).set_stride(strides).set_data_type(kind)
        mixed.set_ragged_offset(offsets)
        graph.build([cudnn.heur_mode.A])
        workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=queries.device)
        return cls(graph, (query, keys, values, key_table, value_table, *lengths, offsets, *sinks, mixed), workspace)


def _handle(device: torch.device) -> Any:
    import cudnn

    with device_of(device).on_device():
        return cudnn.create_handle()

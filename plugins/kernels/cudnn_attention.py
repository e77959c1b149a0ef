"""Attention of prompts by cuDNN, over a paged cache as it lies.

Faster than our own kernel for runs of many tokens, slower for the windows of a round, so it serves prompts alone. It
needs the package nvidia-cudnn-frontend, which uses the cuDNN that torch brings; where it does not serve, our kernel
does. The graph is the scaled dot-product attention of cuDNN's documentation (operations/Attention): padding mask for
runs of different lengths, ragged offsets for runs that lie one behind the other, block tables for the cache, causal
from the bottom right.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from tandemrt.plugins.launch import Context

OLDEST = 90_500  # paged caches
DTYPES = (torch.bfloat16, torch.float16)
_LONGEST = 2048  # tokens of a run that every plan serves
KEYS = 128  # of a tile; attention_prompts.cuh says what follows


@cache
def unavailable() -> str | None:
    """Why cuDNN cannot serve on this machine, in a few words; None if it can."""
    try:
        import cudnn
    except ImportError as error:
        return f"nvidia-cudnn-frontend is not installed ({error}); pip install 'tandemrt[cuda]'"
    version = int(cudnn.backend_version())
    if version < OLDEST:
        return f"cuDNN {version} is older than {OLDEST}; install a newer torch"
    return None


@dataclass(frozen=True)
class RunLengths:
    """What cuDNN asks of packed runs, int32 on the device.

    ``queries`` and ``keys`` [prompts]: new tokens of each run, and all that its text then has in the cache.
    ``offsets`` [prompts + 1]: where each run begins in the queries, in elements.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    offsets: torch.Tensor

    @classmethod
    def of(cls, lengths: torch.Tensor, prompts: int) -> "RunLengths":
        """The rows of int32 [3, prompts + 1], as ``prepare`` writes them (attention_prompts.cuh)."""
        queries, keys, offsets = lengths
        return cls(queries[:prompts], keys[:prompts], offsets)


class CudnnAttention:
    """One call, bound. Capturable: a run allocates nothing and reads nothing on the host.

    ``queries`` [tokens, heads, head_dim] are normed and rotated, the new keys and values are in the caches
    [blocks, kv_heads, block_size, head_dim]; ``table`` int32 [prompts, max_blocks]; ``mixed`` [tokens, heads *
    head_dim] receives the result, and rows that no run has stay as they are. An empty run costs nothing.
    Call ``serves`` first.
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
        context: Context,
    ) -> None:
        import cudnn

        self._device = context.device
        self._set_stream = cudnn.set_stream
        self._handle = context.keep("cudnn", lambda: _handle(context.device))
        # Runs begin where offsets say, so one plan serves all calls whose runs are no longer, and costs short ones
        # nothing.
        longest = longest_run(len(queries), context)
        self._plan = context.keep(
            ("cudnn", queries.dtype, queries.shape[1:], longest, key_cache.shape, table.shape, scale, sliding_window),
            lambda: _Plan.build(self._handle, queries, longest, key_cache, table, scale, sliding_window),
        )
        given = [queries, key_cache, value_cache, table, table]
        given += [lengths.queries, lengths.keys, lengths.offsets, mixed]
        self._tensors = dict(zip(self._plan.tensors, given, strict=True))

    def run(self) -> None:
        """Enqueue the call on torch's current stream."""
        self._set_stream(handle=self._handle, stream=torch.cuda.current_stream(self._device).cuda_stream)
        self._plan.graph.execute(self._tensors, self._plan.workspace, handle=self._handle)


def serves(dtype: torch.dtype, head_dim: int, positions: int) -> bool:
    """Whether cuDNN attends in ``dtype`` over heads of ``head_dim`` on this machine, by tables for ``positions``.

    It looks up whole tiles of keys, so a table that ends within one would be read beyond its end.
    """
    return dtype in DTYPES and head_dim % 8 == 0 and head_dim <= 256 and not positions % KEYS and unavailable() is None


def longest_run(tokens: int, context: Context) -> int:
    """Tokens of a run that the plan of a call with ``tokens`` serves. Of a batch-invariant context it is the same for
    any call: what runs stand in one must not choose the plan."""
    most = context.sizes["query"] if context.batch_invariant else min(tokens, context.sizes.get("query", tokens))
    return max(_LONGEST, 1 << (most - 1).bit_length())


@dataclass(frozen=True)
class _Plan:
    """``tensors``: queries, caches, the table twice, lengths of queries and keys, offsets, result."""

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
    ) -> "_Plan":
        """For tensors of these shapes and dtypes, but for the number of tokens; a run has at most ``longest``."""
        import cudnn

        kind = cudnn.data_type.BFLOAT16 if queries.dtype == torch.bfloat16 else cudnn.data_type.HALF
        whole, single = cudnn.data_type.INT32, cudnn.data_type.FLOAT
        graph = cudnn.pygraph(io_data_type=kind, intermediate_data_type=single, compute_data_type=single, handle=handle)

        def tensor(name: str, shape: tuple[int, ...], data_type: Any = kind) -> Any:
            strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
            return graph.tensor(name=name, dim=list(shape), stride=strides, data_type=data_type)

        (_, heads, head_dim), (prompts, blocks) = queries.shape, table.shape
        # cuDNN orders [batch, heads, tokens, head_dim]; offsets say where a run begins, so no stride of runs is read.
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
        )
        mixed.set_output(True).set_dim(shape).set_stride(strides).set_data_type(kind)
        mixed.set_ragged_offset(offsets)
        graph.build([cudnn.heur_mode.A])
        workspace = torch.empty(max(graph.get_workspace_size(), 1), dtype=torch.uint8, device=queries.device)
        return cls(graph, (query, keys, values, key_table, value_table, *lengths, offsets, mixed), workspace)


def _handle(device: torch.device) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()

"""``latent_attention`` on a GPU."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tandemrt.engines.recipe.backends import CPU
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.kernels.module import Grid, KernelModule, Launch, Tensors, run_in_order, suffix
from tandemrt.plugins.kernels.tensors import check, check_packed
from tandemrt.plugins.operators.constants import LATENT
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.tensors.devices.lookup import device_of

_RANK, _ROTATED = LATENT
_CACHED = _RANK + _ROTATED
_KEYS, _WARPS = 64, 8  # latent_tile.cuh
_ROWS = (16, 32, 64)  # row tiles that the kernels are compiled for
_MAX_SPLITS = 32
_WARP_PER_UNIT: Grid = (128, 1, 1)  # threads of a block with four warps, each with a token or a head of its own


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "LatentAttentionLauncher":
    """Bind the operator; see Launcher in plugins/operators/launch.py."""
    return LatentAttentionLauncher(tensors, context, **attributes)


@dataclass(frozen=True)
class _Texts:
    """Runs of prompts, or windows of one length; ``query``, ``key`` and ``mixed`` begin with their first token."""

    query: torch.Tensor
    key: torch.Tensor
    mixed: torch.Tensor
    table: torch.Tensor
    index: torch.Tensor
    window: int  # tokens of each window; 0 for runs
    rows: torch.Tensor | None = None
    starts: torch.Tensor | None = None


@dataclass(frozen=True)
class _Memory:
    """Shared memory of a thread block: for ``rows`` rows and as many steps of keys as ``stages``."""

    rows: int
    stages: int

    @property
    def bytes(self) -> int:
        groups = _WARPS * 16 // self.rows
        return 2 * (self.rows * (_CACHED + _KEYS) + self.stages * _KEYS * _CACHED) + 4 * self.rows * (groups + 1)

    @classmethod
    def fitting(cls, rows: int, module: KernelModule) -> "_Memory":
        """Return the smallest row tile that holds ``rows``, or the largest that the device has memory for."""
        room = module.shared_memory
        wanted = next((size for size in _ROWS if rows <= size), _ROWS[-1])
        for size in [size for size in reversed(_ROWS) if size <= wanted]:
            for stages in (2, 1):
                if (memory := cls(size, stages)).bytes <= room:
                    return memory
        raise BackendUnavailable(
            f"device: latent_attention needs {cls(_ROWS[0], 1).bytes} bytes of shared memory per block, "
            f"{device_of(module.device).name} has {room}; choose {CPU}"
        )


class LatentAttentionLauncher:
    """One bound call; shapes as in ``tandemrt.plugins.reference.latent_attention``.

    All tensors are contiguous and on the context's device. They share one dtype (bfloat16 or float16; float32 is slow),
    except index tensors. A run updates the cache in place and writes ``mixed``; rows of padding keep their contents. A
    cache block holds a multiple of 64 positions. ``splits`` overrides the number of thread blocks that share the keys
    of a row.

    Calls of one context must run one after another. Capturable: a run allocates nothing and reads nothing on the host.
    A captured run serves any tables, any lengths, and any prompt runs of the same number of runs and tokens.
    """

    def __init__(
        self, tensors: Tensors, context: Context, *, heads: int, scale: float, splits: int | None = None
    ) -> None:
        query, key, mixed = (tensors[name] for name in ("query", "key", "mixed"))
        _check(tensors, heads)
        self._module = KernelModule.of(context, "latent_attention")
        self._context, self._tensors, self._heads, self._splits = context, tensors, heads, splits
        self._scale = np.float32(scale)
        self._device = query.device
        self._launches: tuple[Launch, ...] = ()
        windows, batch = len(query) - len(tensors["prompt_rows"]), len(tensors["write_index"])
        runs = tensors["prompt_table"], tensors["prompt_index"]
        if windows < len(query):  # before the windows, which may follow them in the same text
            self._launches = self._bind(
                _Texts(
                    query[windows:],
                    key[windows:],
                    mixed[windows:],
                    *runs,
                    0,
                    tensors["prompt_rows"],
                    tensors["prompt_starts"],
                )
            )
        if windows:
            own = tensors["block_table"], tensors["write_index"]
            self._launches += self._bind(
                _Texts(query[:windows], key[:windows], mixed[:windows], *own, windows // batch)
            )

    def _bind(self, texts: _Texts) -> tuple[Launch, ...]:
        """Bind launches that write the new keys, attend, and add the results of splits."""
        tokens, kind, cache = len(texts.query), suffix(texts.query), self._tensors["cache"]
        count, heads, module = len(texts.index), self._heads, self._module
        sizes = map(np.int32, (tokens, texts.window, heads, cache.shape[2], texts.table.shape[1]))
        arguments = (
            *(texts.query, texts.key, cache, texts.table, texts.index, texts.rows, texts.starts),
            *(self._tensors["cosine"], self._tensors["sine"], *sizes, self._scale),
        )
        append = Launch(module.kernel(f"append_latent_{kind}"), (-(-tokens // 4), 1, 1), _WARP_PER_UNIT, *arguments)
        if kind == "fp32":
            grid = (-(-tokens * heads // 4), 1, 1)
            return append, Launch(module.kernel("attend_latent_fp32"), grid, _WARP_PER_UNIT, *arguments, texts.mixed)
        memory = _Memory.fitting((texts.window or tokens) * heads, module)
        if texts.starts is None:
            tiles, texts_at_once = -(-texts.window * heads // memory.rows), count
            share = module.sm_count // (count * -(-heads // _ROWS[-1]))  # the same for every length of windows
        else:
            tiles, texts_at_once = -(-tokens * heads // memory.rows) + count - 1, 1
            share = module.sm_count // tiles
        splits = self._splits or max(1, min(share, _MAX_SPLITS, -(-texts.table.shape[1] * cache.shape[2] // _KEYS)))
        parts: tuple[torch.Tensor | None, ...] = (None, None)
        if splits > 1:
            workspace = self._context.get_or_create("latent_attention", lambda: _Workspace(self._device))
            parts = workspace.parts(splits * tokens * heads)
        attend = Launch(
            module.kernel(f"attend_latent_{kind}_{memory.rows}", shared=memory.bytes),
            (tiles * splits, texts_at_once, 1),
            (32 * _WARPS, 1, 1),
            *arguments,
            *map(np.int32, (count, splits, memory.stages)),
            texts.mixed,
            *parts,
            shared=memory.bytes,
        )
        if splits == 1:
            return append, attend
        merge = module.kernel(f"merge_latent_{kind}")
        last = Launch(
            merge, (tokens * heads, 1, 1), (_RANK // 4, 1, 1), *arguments, np.int32(splits), texts.mixed, *parts
        )
        return append, attend, last

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        run_in_order(self._launches, self._device)


class _Workspace:
    """Partial results of splits. Grows to the largest call; calls bound earlier keep their memory."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.empty(0, dtype=torch.float32, device=device)
        self._bounds = torch.empty(0, dtype=torch.float32, device=device)

    def parts(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return room for ``rows`` sums, and for the largest score and the sum of weights of each."""
        if len(self._bounds) < 2 * rows:
            device = self._sums.device
            self._sums = torch.empty(rows * _RANK, dtype=torch.float32, device=device)
            self._bounds = torch.empty(2 * rows, dtype=torch.float32, device=device)
        return self._sums, self._bounds


def _check(tensors: Tensors, heads: int) -> None:
    """Raise ValueError for shapes and dtypes that the kernels do not support."""
    query, cache = tensors["query"], tensors["cache"]
    tokens, angles = len(query), (len(tensors["cosine"]), _ROTATED // 2)
    check("query", query, query.dtype, (tokens, heads * _CACHED))
    check("key", tensors["key"], query.dtype, (tokens, _CACHED))
    check("cache", cache, query.dtype, (len(cache), 1, cache.shape[2], _CACHED))
    check("cosine", tensors["cosine"], query.dtype, angles)
    check("sine", tensors["sine"], query.dtype, angles)
    check("mixed", tensors["mixed"], query.dtype, (tokens, heads * _RANK))
    if cache.shape[2] % _KEYS:
        raise ValueError(f"block_size: a multiple of {_KEYS} is needed, got {cache.shape[2]}")
    check_packed("query", tokens, tensors)

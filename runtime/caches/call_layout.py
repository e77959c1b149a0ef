"""The layout of draft windows and prompts in decoder calls: one for linear caches, one for paged caches."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from itertools import accumulate, pairwise
from struct import pack
from typing import Protocol

import numpy as np

from tandemrt.engines.contract.calls import NO_PROMPTS, Packed, packed, unpadded
from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.runtime.caches.kv_cache import BlockTable, KVCacheManager
from tandemrt.runtime.device.backends.base import Call
from tandemrt.runtime.device.buffers import StagedBuffer
from tandemrt.runtime.device.prompt_plan import Chunk, num_tokens
from tandemrt.runtime.device.round_shape import RoundShape

MAX_PACKED_CALLS = 128  # bound calls with prompts that are kept, per engine (LRU)
_ALIGNMENT = 2  # int64 values; every part begins at a multiple of 16 bytes


class CallLayout(Protocol):
    """Where a call has the tokens of draft windows and those of prompts.

    ``packed``: a call has draft windows and prompts (mixed batch). Otherwise prompts have their own calls before the
    round (engine_loop/planner.py), and every ``prompts`` argument below is NO_PROMPTS. "Windows" are draft windows.
    """

    packed: bool

    def __hash__(self) -> int:
        """Hash by identity, so that bound calls can be cached by layout."""

    def prompts_of(self, windows: int, chunks: Sequence[Chunk]) -> Packed:
        """The padded sizes of ``chunks`` in a call that has ``windows`` tokens of windows, too."""

    def budget(self, windows: int, tokens: int) -> int:
        """The number of prompt tokens with which such a call has up to ``tokens`` tokens and needs no padding."""

    def write(
        self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], prompts: Packed, *, ahead: int = 0
    ) -> None:
        """Enqueue the copy of ``chunks``, which must fit ``prompts``, to the device. ``texts``: tokens by slot.

        ``ahead``: shift the tokens: write the token that is ``ahead`` positions later, or 0 after the end of the text.
        """

    def windows(self, own: torch.Tensor, prompts: Packed) -> torch.Tensor:
        """Where to write the tokens of windows, int64 [batch, query]: ``own``, or the packed buffer with prompts."""

    def token_ids(self, own: torch.Tensor, prompts: Packed) -> torch.Tensor:
        """The ``token_ids`` of a call; the caller writes those of windows into ``windows(own, prompts)``."""

    def token_shape(self, batch: int, query: int, prompts: Packed) -> tuple[int, ...]:
        """The leading dimensions of tensors that hold one entry per token of a call."""

    def row_starts(self, batch: int, query: int) -> torch.Tensor:
        """int64 [batch, 1]: the offsets of ``score_rows``, per row of ``query`` tokens."""

    def bindings(self, prompts: Packed) -> dict[str, torch.Tensor]:
        """The other bindings of the prompts in a call."""

    def slots(self, prompts: Packed) -> torch.Tensor | None:
        """The slots of the prompts in a call, int64 [runs]; None without prompts."""


class LinearLayout:
    """The layout for linear caches: windows are rows [batch, query]; prompts have their own calls."""

    packed = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.row_starts = cache(self._row_starts)

    def prompts_of(self, windows: int, chunks: Sequence[Chunk]) -> Packed:  # noqa: ARG002
        """See CallLayout.prompts_of."""
        return NO_PROMPTS

    def budget(self, windows: int, tokens: int) -> int:  # noqa: ARG002
        """See CallLayout.budget."""
        return tokens

    def write(
        self,
        chunks: Sequence[Chunk],  # noqa: ARG002
        texts: Mapping[int, Sequence[int]],  # noqa: ARG002
        prompts: Packed,
        *,
        ahead: int = 0,  # noqa: ARG002
    ) -> None:
        """Raise InternalError."""
        raise InternalError(f"prompts: a call over a linear cache cannot have prompts, received {prompts}")

    def windows(self, own: torch.Tensor, prompts: Packed) -> torch.Tensor:  # noqa: ARG002
        """See CallLayout.windows."""
        return own

    def token_ids(self, own: torch.Tensor, prompts: Packed) -> torch.Tensor:  # noqa: ARG002
        """See CallLayout.token_ids."""
        return own

    def token_shape(self, batch: int, query: int, prompts: Packed) -> tuple[int, ...]:  # noqa: ARG002
        """See CallLayout.token_shape."""
        return batch, query

    def bindings(self, prompts: Packed) -> dict[str, torch.Tensor]:  # noqa: ARG002
        """See CallLayout.bindings."""
        return {}

    def slots(self, prompts: Packed) -> torch.Tensor | None:  # noqa: ARG002
        """See CallLayout.slots."""
        return None

    def _row_starts(self, batch: int, query: int) -> torch.Tensor:  # noqa: ARG002
        return torch.zeros(batch, 1, dtype=torch.int64, device=self._device)


class PackedLayout:
    """The layout for paged caches: one flat row with the tokens of windows, then those of prompts (contract.packed).

    All values of prompts are in one buffer, which is written with one copy per round. The tokens of windows are
    directly before those of prompts, so that both are one tensor for any number of windows. ``windows``: maximum number
    of window tokens. ``largest``: sizes of the largest call. ``table`` [slots, blocks]: the block table.

    The rest of the buffer is padding, so calls of different sizes can read the same prompts.
    """

    packed = True

    def __init__(self, *, windows: int, largest: Packed, table: torch.Tensor) -> None:
        tokens, runs = largest
        self._front = _aligned(windows)
        self._tables = table
        sizes = {"ids": tokens, "index": runs, "slots": runs, "rows": (tokens + 1) // 2, "starts": runs // 2 + 1}
        ends = list(accumulate(map(_aligned, sizes.values()), initial=self._front))
        self._parts = {name: slice(*part) for name, part in zip(sizes, pairwise(ends), strict=True)}
        self._staged = StagedBuffer(ends[-1], torch.int64, table.device)
        self._memory = self._staged.device
        self._table = torch.zeros(runs, table.shape[1], dtype=torch.int32, device=table.device)
        self.row_starts = cache(self._row_starts)
        self._table_of = cache(lambda prompts: (self._part("slots")[:prompts], self._table[:prompts]))

    def prompts_of(self, windows: int, chunks: Sequence[Chunk]) -> Packed:
        """See CallLayout.prompts_of."""
        return packed(windows, num_tokens(chunks), len(chunks))

    def budget(self, windows: int, tokens: int) -> int:
        """See CallLayout.budget."""
        return unpadded(windows, tokens)

    def write(
        self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], prompts: Packed, *, ahead: int = 0
    ) -> None:
        """See CallLayout.write."""
        ids: list[int] = []
        for slot, start, end in chunks:
            known_ids = texts[slot][start + ahead : end + ahead]
            ids += [*known_ids, *[0] * (end - start - len(known_ids))]
        count, counts = len(ids), [chunk.tokens for chunk in chunks]
        host = self._staged.host
        host[self._front :] = 0
        parts = {name: host[part] for name, part in self._parts.items()}
        parts["ids"][:count] = np.frombuffer(pack(f"{count}q", *ids), np.int64)  # faster than from the list
        parts["index"][: len(chunks)] = [chunk.start for chunk in chunks]
        parts["slots"][: len(chunks)] = [chunk.slot for chunk in chunks]
        rows, starts = parts["rows"].view(np.int32), parts["starts"].view(np.int32)
        rows[:count] = np.repeat(np.arange(len(chunks), dtype=np.int32), counts)
        rows[count:] = -1
        starts[1 : len(chunks) + 1] = np.cumsum(counts)
        starts[len(chunks) + 1 :] = count  # entries after the last chunk are empty
        self._staged.copy_in(self._front, len(host))
        slots, table = self._table_of(prompts.prompts)
        torch.index_select(self._tables, 0, slots, out=table)

    def windows(self, own: torch.Tensor, prompts: Packed) -> torch.Tensor:
        """See CallLayout.windows."""
        return own if prompts == NO_PROMPTS else self.token_ids(own, prompts)[: own.numel()].view(*own.shape)

    def token_ids(self, own: torch.Tensor, prompts: Packed) -> torch.Tensor:
        """See CallLayout.token_ids. Shape [tokens]."""
        if prompts == NO_PROMPTS:
            return own.reshape(-1)
        return self._memory[self._front - own.numel() : self._front + prompts.prompt_tokens]

    def token_shape(self, batch: int, query: int, prompts: Packed) -> tuple[int, ...]:
        """See CallLayout.token_shape."""
        return (batch * query + prompts.prompt_tokens,)

    def bindings(self, prompts: Packed) -> dict[str, torch.Tensor]:
        """See CallLayout.bindings. Empty without prompts, because PagedCache.rows has the bindings of that case."""
        if prompts == NO_PROMPTS:
            return {}
        return {
            "prompt_rows": viewed(self._part("rows"), torch.int32)[: prompts.prompt_tokens],
            "prompt_starts": viewed(self._part("starts"), torch.int32)[: prompts.prompts + 1],
            "prompt_index": self._part("index")[: prompts.prompts],
            "prompt_table": self._table[: prompts.prompts],
        }

    def slots(self, prompts: Packed) -> torch.Tensor | None:
        """See CallLayout.slots."""
        return None if prompts == NO_PROMPTS else self._part("slots")[: prompts.prompts]

    def _row_starts(self, batch: int, query: int) -> torch.Tensor:
        starts = [[query * row] for row in range(batch)]
        return torch.tensor(starts, dtype=torch.int64, device=self._memory.device)

    def _part(self, name: str) -> torch.Tensor:
        return self._memory[self._parts[name]]


def make_layout(cache_manager: KVCacheManager, device: torch.device, *, windows: int, largest: Packed) -> CallLayout:
    """The layout of calls over the caches of ``cache_manager``; ``windows`` and ``largest``: see PackedLayout."""
    if isinstance(cache_manager, BlockTable):
        return PackedLayout(windows=windows, largest=largest, table=cache_manager.device)
    return LinearLayout(device)


def cache_calls(bind: Callable[[RoundShape], Call]) -> Callable[[RoundShape], Call]:
    """Wrap ``bind`` with a cache by shape.

    Calls without prompts are never dropped, because CUDA graphs use their tensors. There are many shapes with prompts,
    so only the MAX_PACKED_CALLS most recently used ones are kept; see Graphs.run_with_prompts.
    """
    always, newest = cache(bind), lru_cache(MAX_PACKED_CALLS)(bind)
    return lambda shape: (always if shape.prompts == NO_PROMPTS else newest)(shape)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT

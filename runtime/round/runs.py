"""The prompts' part of packed calls: token ids and where they stand, one piece of memory, one copy per round."""

from collections.abc import Mapping, Sequence

import numpy as np

from tandemrt.engines.calls import Packed
from tandemrt.plugins.tensors import torch, viewed
from tandemrt.runtime.device import upload
from tandemrt.runtime.round.planner import Chunk

_ALIGNED = 2  # int64 values: every part begins at a multiple of 16 bytes


class PromptRuns:
    """What contract.packed says of runs of prompts, for calls up to the ``largest``.

    The windows of a call lie right in front of its prompts, so that both are one tensor however many windows there
    are; ``windows`` is how many tokens of windows at most. ``table`` [slots, blocks] are the block tables of all slots.

    Behind what was written there is padding up to the largest call, so calls of any size may read the same prompts.
    """

    def __init__(self, *, windows: int, largest: Packed, table: torch.Tensor) -> None:
        tokens, runs = largest
        self._front = _aligned(windows)
        self._tables = table
        self._sizes = {"ids": tokens, "index": runs, "slots": runs, "rows": (tokens + 1) // 2, "starts": runs // 2 + 1}
        self._sizes = {name: _aligned(size) for name, size in self._sizes.items()}
        size = self._front + sum(self._sizes.values())
        self._memory = torch.zeros(size, dtype=torch.int64, device=table.device)
        self._table = torch.zeros(runs, table.shape[1], dtype=torch.int32, device=table.device)

    def write(
        self, chunks: Sequence[Chunk], texts: Mapping[int, Sequence[int]], sizes: Packed, *, ahead: int = 0
    ) -> None:
        """Enqueue the copy of ``chunks``, at most as many as ``sizes`` says; ``texts``: tokens by slot.

        ``ahead``: in the place of a token stands the one so far behind it, 0 where the text has none.
        """
        parts = {name: np.zeros(size, np.int64) for name, size in self._sizes.items()}
        ids: list[int] = []
        for slot, start, end in chunks:
            found = texts[slot][start + ahead : end + ahead]
            ids += [*found, *[0] * (end - start - len(found))]
        counts = [chunk.tokens for chunk in chunks]
        parts["ids"][: len(ids)] = ids
        parts["index"][: len(chunks)] = [chunk.start for chunk in chunks]
        parts["slots"][: len(chunks)] = [chunk.slot for chunk in chunks]
        rows, starts = parts["rows"].view(np.int32), parts["starts"].view(np.int32)
        rows[:] = -1
        rows[: len(ids)] = np.repeat(np.arange(len(chunks), dtype=np.int32), counts)
        starts[1:] = len(ids)  # runs behind the last one are empty
        starts[1 : len(chunks) + 1] = np.cumsum(counts)
        upload(np.concatenate(list(parts.values())), self._memory[self._front :])
        slots = self._part("slots")[: sizes.prompts]
        torch.index_select(self._tables, 0, slots, out=self._table[: sizes.prompts])

    def token_ids(self, windows: int, sizes: Packed) -> torch.Tensor:
        """The tokens of a call with ``windows`` tokens of windows, int64 [tokens]; whoever calls fills the windows."""
        return self._memory[self._front - windows : self._front + sizes.prompt_tokens]

    def windows(self, batch: int, query: int, sizes: Packed) -> torch.Tensor:
        """The windows' part of ``token_ids``, [batch, query]."""
        return self.token_ids(batch * query, sizes)[: batch * query].view(batch, query)

    def bindings(self, sizes: Packed) -> dict[str, torch.Tensor]:
        """The other bindings of the prompts' part."""
        return {
            "prompt_rows": viewed(self._part("rows"), torch.int32)[: sizes.prompt_tokens],
            "prompt_starts": viewed(self._part("starts"), torch.int32)[: sizes.prompts + 1],
            "prompt_index": self._part("index")[: sizes.prompts],
            "prompt_table": self._table[: sizes.prompts],
        }

    def _part(self, wanted: str) -> torch.Tensor:
        start = self._front
        for name, size in self._sizes.items():
            if name == wanted:
                return self._memory[start : start + size]
            start += size
        raise KeyError(wanted)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

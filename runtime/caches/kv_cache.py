"""Key/value caches: tensors allocated once, updated in place by the engine, shared out to slots."""

from collections.abc import Sequence
from typing import Protocol

from tandemrt.engines.contract import BLOCK_SIZE, Contract, blocks_of, table_width
from tandemrt.engines.manifest import Limits
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.allocator import BlockAllocator
from tandemrt.runtime.caches.linear import LinearCache, LinearRoom
from tandemrt.runtime.caches.tensors import cache_tensors
from tandemrt.runtime.device import upload


class Cache(Protocol):
    """The cache of one decoder, under the contract's ``past_*`` names."""

    tensors: dict[str, torch.Tensor]

    def rows(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """The bindings of a call for slots [start, start + count)."""


class Room(Protocol):
    """How the memory of the caches is shared out to slots."""

    finds_answers: bool  # whether tokens that rounds have written are found again, too, or those of prompts alone

    def reserve(self, slot: int, tokens: int, hashes: Sequence[bytes] = ()) -> int | None:
        """Make sure that ``slot`` can hold ``tokens`` tokens until it leaves. None if there is too little memory.

        ``hashes`` (BlockHashes) name the first blocks of the text of a slot that holds nothing yet. Returns how many
        tokens of it are in the caches already, a multiple of BLOCK_SIZE.
        """

    def know(self, slot: int, hashes: Sequence[bytes]) -> None:
        """Let others find the first blocks of the text of ``slot``, of these ``hashes``.

        All that writes them must have been enqueued: whoever finds them reads behind it, in the order of the device's
        work. Nothing may write them again but what they hold.
        """

    def leave(self, slot: int) -> None:
        """Take back what ``slot`` holds, if anything, behind all work that was enqueued for it."""


class BlockTable:
    """Which blocks each slot's tokens lie in: int32 [slots, max_blocks] on the device, shared by all paged caches.

    A slot without a request has a row of zeros, the scratch block. Changes are ordered by the current stream, so a
    block changes hands behind everything its last owner wrote, and who finds a known block reads it behind all that
    was written to it.
    """

    finds_answers = True

    def __init__(self, slots: int, max_blocks: int, blocks: int, device: torch.device) -> None:
        self.device = torch.zeros(slots, max_blocks, dtype=torch.int32, device=device)
        self.allocator = BlockAllocator(blocks)

    def reserve(self, slot: int, tokens: int, hashes: Sequence[bytes] = ()) -> int | None:
        """See Room.reserve."""
        held = self.allocator.held(slot)
        if held >= blocks_of(tokens):  # every round asks for every slot
            return 0
        found = 0 if held else self.allocator.found(hashes)
        blocks = self.allocator.allocate(slot, tokens, hashes)
        if blocks is None:
            return None
        upload(blocks, self.device[slot, held : held + len(blocks)])
        return found * BLOCK_SIZE

    def know(self, slot: int, hashes: Sequence[bytes]) -> None:
        """See Room.know."""
        self.allocator.know(slot, hashes)

    def leave(self, slot: int) -> None:
        """See Room.leave."""
        if not self.allocator.held(slot):
            return
        try:
            self.device[slot].zero_()
        finally:
            self.allocator.free(slot)


class PagedCache:
    """Tensors [blocks, kv_heads, block_size, head_dim] that all slots share, by a table."""

    def __init__(self, contract: Contract, table: BlockTable, device: torch.device) -> None:
        self.tensors = cache_tensors(contract, {"blocks": table.allocator.blocks}, device)
        self._table = table

    def rows(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """See Cache.rows. The call has windows of these slots and no prompts."""
        table = self._table.device
        return {"block_table": table[start : start + count], **no_prompts(table), **self.tensors}


def windows(contract: Contract, tokens: torch.Tensor, score_rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """``token_ids`` and ``score_rows`` of a call of windows ``tokens`` [batch, query], in the form of ``contract``.

    ``score_rows`` [batch, rows]: which tokens of its window a row wants logits of.
    """
    if not is_paged(contract):
        return {"token_ids": tokens, "score_rows": score_rows}
    batch, query = tokens.shape
    first = score_rows.new_tensor([[query * row] for row in range(batch)])
    return {"token_ids": tokens.reshape(-1), "score_rows": score_rows + first}


def no_prompts(table: torch.Tensor) -> dict[str, torch.Tensor]:
    """The bindings that say of a packed call that it has no prompts; ``table``: any block table of the cache."""
    device = table.device
    return {
        "prompt_rows": torch.empty(0, dtype=torch.int32, device=device),
        "prompt_starts": torch.zeros(1, dtype=torch.int32, device=device),
        "prompt_index": torch.empty(0, dtype=torch.int64, device=device),
        "prompt_table": table[:0],
    }


def make_room(
    limits: Limits, contracts: Sequence[Contract], tokens: int | None, device: torch.device, *, window: int
) -> Room:
    """Memory for ``tokens`` tokens in all (None: as many as the bundle says), shared by the caches of ``contracts``.

    Rounds write at most ``window`` tokens behind the newest one of a text (calls.slack).
    ``tokens`` sizes paged caches; RuntimeOptions.require_fit refuses it where there are none.
    """
    if not any(map(is_paged, contracts)):
        return LinearRoom(window)
    return BlockTable(limits.batch, table_width(limits.capacity), blocks_in_all(limits, tokens), device)


def blocks_in_all(limits: Limits, tokens: int | None) -> int:
    """Blocks of the paged caches for ``tokens`` tokens (None: as many as the bundle says), scratch included."""
    if tokens is not None:
        return 1 + blocks_of(tokens)
    return 1 + (limits.cache_blocks or limits.batch * blocks_of(limits.capacity))


def make_cache(contract: Contract, slots: int, room: Room, device: torch.device) -> Cache:
    """The cache of a decoder, in the form that its contract asks for."""
    if not is_paged(contract):
        assert isinstance(room, LinearRoom)
        linear = LinearCache(contract, slots, device)
        room.add(linear)
        return linear
    assert isinstance(room, BlockTable)
    return PagedCache(contract, room, device)


def is_paged(contract: Contract) -> bool:
    return any(binding.name == "block_table" for binding in contract.inputs)

"""KV caches: tensors that engines update in place, and managers that allocate their memory to slots."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tandemrt.engines.bundle.manifest import Limits
from tandemrt.engines.contract.contract import BLOCK_SIZE, Contract, blocks_of, num_snapshots, table_width
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.allocator import BlockAllocator
from tandemrt.runtime.caches.linear import LinearCache, LinearCacheManager
from tandemrt.runtime.caches.recurrent import PromptRuns, RecurrentStates, Snapshots, is_recurrent
from tandemrt.runtime.caches.tensors import cache_tensors
from tandemrt.runtime.device.backends.base import Call, Engine
from tandemrt.runtime.device.buffers import StagedBuffer


class Cache(Protocol):
    """The cache of one decoder, under the contract's ``past_*`` names."""

    tensors: dict[str, torch.Tensor]

    def rows(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """The bindings of a call for slots [start, start + count)."""

    def bind(
        self,
        engine: Engine,
        slot: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        final: torch.Tensor | None = None,
        certain: int = 0,
        prompt_slots: torch.Tensor | None = None,
    ) -> Call:
        """Bind a call of the cache's decoder for the slots from ``slot`` on; ``tensors`` are its other bindings.

        No later call begins before position ``final`` + ``certain`` of its text, so recurrent states may move there.
        ``final`` [slots]: by default ``write_index``, because drafted tokens may be rejected. ``prompt_slots``: the
        slots of prompt runs in the call, None without runs. A run makes all its tokens but the last final.
        """


class KVCacheManager(Protocol):
    """Allocates the memory of all KV caches to slots, and finds cached prefixes."""

    caches_outputs: bool  # whether prefix caching includes output tokens; if not, only prompt tokens

    @property
    def reuses_whole_chunks(self) -> bool:
        """Whether a cached prefix ends only where a chunk of a prompt did, so that chunks should end with a block.

        It holds for recurrent layers, whose kernels give a token the same bits for any chunks that end with blocks.
        """

    @property
    def usage(self) -> float:
        """Share of the memory that slots hold, 0 to 1. Any thread may read it."""

    def reserve(self, slot: int, tokens: int, hashes: Sequence[bytes] = ()) -> int | None:
        """Reserve whole blocks for ``tokens`` tokens in total in ``slot``, until ``leave``. None if memory is short.

        ``hashes``: BlockHashes of the first blocks of the text, used if the slot is empty. Returns the number of tokens
        that are cached already, a multiple of BLOCK_SIZE; 0 if the slot was not empty.
        """

    def register_prefix(self, slot: int, hashes: Sequence[bytes], *, of_prompt: bool = True) -> None:
        """Let other requests reuse the first blocks of ``slot``, identified by ``hashes``.

        The work that writes these blocks must be enqueued before, so that later readers run after it on the device.
        The blocks must not change afterwards. ``of_prompt``: all are blocks of the prompt.
        """

    def leave(self, slot: int) -> None:
        """Free the memory of ``slot``, if it has any. Work that uses it may be enqueued until the next ``reserve``."""

    def flush(self) -> None:
        """Let work that is enqueued from now on use the memory as reserved. Call after the last ``reserve``."""


class BlockTable:
    """The block table: int32 [slots, max_blocks] on the device, shared by all paged caches.

    The row of a free slot is 0, the scratch block. ``flush`` uploads what has changed. The current stream orders all
    accesses: the next owner of a block writes after the last one, and readers of a shared block read after all writes
    to it.
    """

    def __init__(
        self, slots: int, max_blocks: int, blocks: int, device: torch.device, *, caches_outputs: bool = True
    ) -> None:
        self.caches_outputs = caches_outputs
        self._staged = StagedBuffer(slots * max_blocks, torch.int32, device)
        self.device = self._staged.device.view(slots, max_blocks)
        self._changed = range(0)  # rows that are not on the device yet, and some between them
        self._restarted: set[int] = set()  # slots whose recurrent states are at the beginning, not on the device yet
        self.allocator = BlockAllocator(blocks)
        self._snapshots = Snapshots()

    def add(self, states: RecurrentStates) -> None:
        """Manage the states of a decoder's recurrent layers, too."""
        self._snapshots.add(states, num_snapshots(len(self.device), "paged"))

    @property
    def reuses_whole_chunks(self) -> bool:
        """See KVCacheManager.reuses_whole_chunks."""
        return bool(self._snapshots)

    @property
    def usage(self) -> float:
        """See KVCacheManager.usage."""
        blocks = self.allocator.blocks - 1  # without the scratch block
        return (blocks - self.allocator.available) / blocks

    def reserve(self, slot: int, tokens: int, hashes: Sequence[bytes] = ()) -> int | None:
        """See KVCacheManager.reserve."""
        num_held = self.allocator.num_blocks(slot)
        if num_held >= blocks_of(tokens):  # the usual case, because every round reserves memory for every slot
            return 0
        num_cached = 0 if num_held else self.allocator.count_cached(hashes)
        if num_cached and self._snapshots:  # recurrent layers continue only from a copy of their state
            num_cached = self._snapshots.longest(hashes[:num_cached])
            hashes = hashes[:num_cached]
        blocks = self.allocator.allocate(slot, tokens, hashes)
        if blocks is None:
            return None
        self._write(slot, num_held, blocks)
        if self._snapshots and num_cached:
            self._restarted.discard(slot)
            self._snapshots.restore(slot, hashes[num_cached - 1])
        elif self._snapshots and not num_held:
            self._restarted.add(slot)
        return num_cached * BLOCK_SIZE

    def register_prefix(self, slot: int, hashes: Sequence[bytes], *, of_prompt: bool = True) -> None:
        """See KVCacheManager.register_prefix."""
        self.allocator.register_prefix(slot, hashes)
        if of_prompt:  # the states of an output are seldom at the end of a block
            self._snapshots.take(slot, hashes)

    def leave(self, slot: int) -> None:
        """See KVCacheManager.leave."""
        blocks = self.allocator.num_blocks(slot)
        if not blocks:
            return
        try:
            self._write(slot, 0, [0] * blocks)
        finally:
            self.allocator.free(slot)

    def flush(self) -> None:
        """See KVCacheManager.flush."""
        if self._changed:
            changed, self._changed = self._changed, range(0)
            columns = self.device.shape[1]
            self._staged.copy_in(changed.start * columns, changed.stop * columns)
        if self._restarted:
            restarted, self._restarted = self._restarted, set()
            self._snapshots.restart(restarted)

    def _write(self, slot: int, first: int, blocks: Sequence[int]) -> None:
        """Set the entries of ``slot`` from ``first`` on."""
        start = slot * self.device.shape[1] + first
        self._staged.host[start : start + len(blocks)] = blocks
        changed = self._changed or range(slot, slot + 1)
        self._changed = range(min(slot, changed.start), max(slot + 1, changed.stop))


class PagedCache:
    """Tensors [blocks, kv_heads, block_size, head_dim] that all slots share through a block table.

    Recurrent layers have states of each slot instead.
    """

    def __init__(self, engine: Engine, table: BlockTable) -> None:
        slots, contract, device = len(table.device), engine.contract, engine.device
        self.tensors = cache_tensors(contract, {"blocks": table.allocator.blocks, "slots": slots}, device)
        self._table = table
        self._states = RecurrentStates(self.tensors, slots, device, engine) if is_recurrent(contract) else None
        if self._states is not None:
            table.add(self._states)

    def rows(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """See Cache.rows. For a call without prompts; otherwise CallLayout.bindings replaces some of these."""
        table = self._table.device
        states = {} if self._states is None else self._states.indices(start, count) | no_run_states(table)
        return {"block_table": table[start : start + count], **no_prompts(table), **self.tensors, **states}

    def bind(
        self,
        engine: Engine,
        slot: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        final: torch.Tensor | None = None,
        certain: int = 0,
        prompt_slots: torch.Tensor | None = None,
    ) -> Call:
        """See Cache.bind."""
        index = tensors["write_index"]
        bound = {**self.rows(slot, len(index)), **tensors}
        if self._states is None:
            return engine.bind(bound)
        if prompt_slots is not None:
            covered = torch.empty(len(prompt_slots), dtype=torch.int64, device=engine.device)
            bound |= {"prompt_slots": prompt_slots, "prompt_state_index": covered}
        call = engine.bind(bound)
        if len(bound["token_ids"]) > len(bound["prompt_rows"]):  # the call has windows
            call = self._states.committing(call, slot, index if final is None else final, certain)
        if prompt_slots is None:
            return call
        runs = PromptRuns(prompt_slots, bound["prompt_starts"], bound["prompt_index"], covered)
        return self._states.with_runs(call, runs)


def window_bindings(contract: Contract, tokens: torch.Tensor, score_rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the bindings ``token_ids`` and ``score_rows`` for draft windows ``tokens`` [batch, query].

    ``score_rows`` [batch, rows]: the tokens of each window that get logits.
    """
    if not is_paged(contract):
        return {"token_ids": tokens, "score_rows": score_rows}
    batch, query = tokens.shape
    first = score_rows.new_tensor([[query * row] for row in range(batch)])
    return {"token_ids": tokens.reshape(-1), "score_rows": score_rows + first}


def no_prompts(table: torch.Tensor) -> dict[str, torch.Tensor]:
    """The prompt bindings of a packed call without prompts; ``table``: any block table of the cache."""
    device = table.device
    return {
        "prompt_rows": torch.empty(0, dtype=torch.int32, device=device),
        "prompt_starts": torch.zeros(1, dtype=torch.int32, device=device),
        "prompt_index": torch.empty(0, dtype=torch.int64, device=device),
        "prompt_table": table[:0],
    }


def no_run_states(table: torch.Tensor) -> dict[str, torch.Tensor]:
    """The bindings of recurrent states of a packed call without prompts; ``table``: any block table of the cache."""
    nothing = torch.empty(0, dtype=torch.int64, device=table.device)
    return {"prompt_slots": nothing, "prompt_state_index": nothing}


def make_cache_manager(
    limits: Limits,
    contracts: Sequence[Contract],
    tokens: int | None,
    device: torch.device,
    *,
    slack: int,
    caches_outputs: bool,
) -> KVCacheManager:
    """Make the manager of the caches of ``contracts``, with memory for ``tokens`` tokens (None: the bundle's number).

    ``slack``: how many positions after the newest token of a text a round may write (calls.slack). ``tokens`` applies
    to paged caches; RuntimeOptions.require_fit rejects it for linear ones. ``caches_outputs``: whether prefix caching
    includes output tokens, in a paged cache.
    """
    if not any(map(is_paged, contracts)):
        return LinearCacheManager(slack)
    blocks = num_cache_blocks(limits, tokens)
    return BlockTable(limits.batch, table_width(limits.capacity), blocks, device, caches_outputs=caches_outputs)


def num_cache_blocks(limits: Limits, tokens: int | None) -> int:
    """The number of blocks for ``tokens`` tokens (None: the bundle's number), including the scratch block."""
    if tokens is not None:
        return 1 + blocks_of(tokens)
    return 1 + (limits.cache_blocks or limits.batch * blocks_of(limits.capacity))


def make_cache(engine: Engine, slots: int, cache_manager: KVCacheManager) -> Cache:
    """Make the cache of a decoder, linear or paged as its contract says."""
    if not is_paged(engine.contract):
        assert isinstance(cache_manager, LinearCacheManager)
        linear = LinearCache(engine.contract, slots, engine.device)
        cache_manager.add(linear)
        return linear
    assert isinstance(cache_manager, BlockTable)
    return PagedCache(engine, cache_manager)


def is_paged(contract: Contract) -> bool:
    """Whether a decoder uses a paged cache."""
    return any(binding.name == "block_table" for binding in contract.inputs)

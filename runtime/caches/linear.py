"""Linear KV caches: one row of full length per slot. Prefix caching copies the prefix from another row."""

from collections.abc import Mapping, Sequence

from tandemrt.engines.contract.contract import BLOCK_SIZE, Contract, num_snapshots
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.recurrent import RecurrentStates, Snapshots, is_recurrent
from tandemrt.runtime.caches.tensors import cache_tensors
from tandemrt.runtime.device.backends.base import Call, Engine


class LinearCache:
    """Tensors [slots, kv_heads, capacity, head_dim]: one row per slot. Recurrent layers have states instead."""

    def __init__(self, contract: Contract, slots: int, device: torch.device) -> None:
        self.tensors = cache_tensors(contract, {"batch": slots}, device)
        self.states = RecurrentStates(self.tensors, slots, device) if is_recurrent(contract) else None

    @property
    def keys_and_values(self) -> list[torch.Tensor]:
        """The tensors of layers with attention."""
        states = () if self.states is None else self.states.tensors
        return [tensor for name, tensor in self.tensors.items() if name not in states]

    def rows(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """See Cache.rows."""
        states = {} if self.states is None else self.states.indices(start, count)
        return {name: tensor[start : start + count] for name, tensor in self.tensors.items()} | states

    def bind(
        self,
        engine: Engine,
        slot: int,
        tensors: Mapping[str, torch.Tensor],
        *,
        final: torch.Tensor | None = None,
        certain: int = 0,
        prompt_slots: torch.Tensor | None = None,  # noqa: ARG002
    ) -> Call:
        """See Cache.bind."""
        index = tensors["write_index"]
        call = engine.bind({**tensors, **self.rows(slot, len(index))})
        if self.states is None:
            return call
        return self.states.committing(call, slot, index if final is None else final, certain)


class LinearCacheManager:
    """Gives each slot its own row, and copies a shared prefix from the row that holds it.

    A copy is much faster than a prefill. With copies a request may use any slot, so running requests stay in the low
    slots, where rounds are small. Rounds also write the first ``slack`` + 1 positions of free slots. These
    positions are saved when a request leaves, so that its row remains a source until another request uses the slot.

    Output tokens are not cached: on a CPU the last bits of a token's keys and values may depend on how many tokens are
    computed together (GroupQueryAttention, MatMulNBits), and a text must not depend on cache hits.
    """

    caches_outputs = False

    def __init__(self, slack: int) -> None:
        self._num_saved = slack + 1  # positions
        self._slots = 0
        self._snapshots = Snapshots()
        self._rows: list[torch.Tensor] = []
        self._saved: list[torch.Tensor] = []  # per cache tensor: the saved first positions of free rows
        self._hashes: dict[int, list[bytes]] = {}  # by slot: hashes of the blocks in its row
        self._free: set[int] = set()  # free slots, whose first positions are saved

    def add(self, cache: LinearCache) -> None:
        """Manage the rows of ``cache``, too."""
        rows = cache.keys_and_values
        self._slots = len(next(iter(cache.tensors.values())))
        self._rows += rows
        self._saved += [torch.zeros_like(tensor[:, :, : self._num_saved]) for tensor in rows]
        if cache.states is not None:
            self._snapshots.add(cache.states, num_snapshots(self._slots, "linear"))

    @property
    def reuses_whole_chunks(self) -> bool:
        """See KVCacheManager.reuses_whole_chunks."""
        return bool(self._snapshots)

    @property
    def usage(self) -> float:
        """See KVCacheManager.usage. A slot holds its whole row."""
        return (len(self._hashes) - len(self._free)) / self._slots if self._slots else 0.0

    def reserve(self, slot: int, tokens: int, hashes: Sequence[bytes] = ()) -> int | None:  # noqa: ARG002
        """See KVCacheManager.reserve."""
        if slot in self._hashes and slot not in self._free:
            return 0
        source, num_cached = slot, 0
        for other, other_hashes in self._hashes.items():
            same = _num_common(other_hashes, hashes)
            if same > num_cached:
                source, num_cached = other, same
        if self._snapshots:  # recurrent layers continue only from a copy of their state
            num_cached = self._snapshots.longest(hashes[:num_cached])
        self._snapshots.clear(slot)
        saved = source in self._free
        self._hashes[slot] = []  # no source for others until the copy is complete
        self._free.discard(slot)
        if num_cached:
            self._copy(source, slot, num_cached * BLOCK_SIZE, saved=saved)
            if self._snapshots:
                self._snapshots.restore(slot, hashes[num_cached - 1])
        self._hashes[slot] = list(hashes[:num_cached])
        return num_cached * BLOCK_SIZE

    def register_prefix(self, slot: int, hashes: Sequence[bytes], *, of_prompt: bool = True) -> None:  # noqa: ARG002
        """See KVCacheManager.register_prefix."""
        self._hashes[slot] = list(hashes)
        self._snapshots.take(slot, hashes)

    def leave(self, slot: int) -> None:
        """See KVCacheManager.leave."""
        if slot not in self._hashes or slot in self._free:
            return
        hashes, self._hashes[slot] = self._hashes[slot], []
        self._free.add(slot)
        if hashes:
            for row, head in zip(self._rows, self._saved, strict=True):
                head[slot] = row[slot, :, : self._num_saved]
        self._hashes[slot] = hashes

    def flush(self) -> None:
        """See KVCacheManager.flush. Rows always belong to their slots."""

    def _copy(self, source: int, slot: int, tokens: int, *, saved: bool) -> None:
        for row, head in zip(self._rows, self._saved, strict=True):
            if source != slot:
                row[slot, :, :tokens] = row[source, :, :tokens]
            if saved:
                row[slot, :, : self._num_saved] = head[source]


def _num_common(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """Return how many leading elements are equal."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

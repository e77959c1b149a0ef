"""A row of full length for every slot, and what is still known of rows: texts that begin alike copy it."""

from collections.abc import Sequence

from tandemrt.engines.contract import BLOCK_SIZE, Contract
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.caches.tensors import cache_tensors


class LinearCache:
    """Tensors [slots, kv_heads, capacity, head_dim]: one row per slot."""

    def __init__(self, contract: Contract, slots: int, device: torch.device) -> None:
        self.tensors = cache_tensors(contract, {"batch": slots}, device)

    def rows(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """See Cache.rows."""
        return {name: tensor[start : start + count] for name, tensor in self.tensors.items()}


class LinearRoom:
    """Rows, of which a slot has one to itself. What a text has in common with a known row is copied from there.

    A copy takes the time of reading memory where a prefill takes that of a model, and keeps the slots of running
    requests in front, where rounds are small. A free slot is a row of rounds, which write its first ``window`` + 1
    positions; those are set aside when a request leaves, so that its row stays known until another one takes it.

    What rounds wrote is not found again: a CPU computes a token alone and among others with different last bits
    (export/model/grouped_attention.py), and a text must not depend on what was found.
    """

    finds_answers = False

    def __init__(self, window: int) -> None:
        self._aside = window + 1  # positions
        self._rows: list[torch.Tensor] = []
        self._heads: list[torch.Tensor] = []  # of each tensor the first positions of free rows
        self._known: dict[int, list[bytes]] = {}  # hashes of what the row of a slot holds
        self._free: set[int] = set()  # of those, whose beginning is set aside

    def add(self, cache: LinearCache) -> None:
        """Share out the rows of ``cache``, too."""
        self._rows += cache.tensors.values()
        self._heads += [torch.zeros_like(tensor[:, :, : self._aside]) for tensor in cache.tensors.values()]

    def reserve(self, slot: int, tokens: int, hashes: Sequence[bytes] = ()) -> int | None:  # noqa: ARG002
        """See Room.reserve."""
        if slot in self._known and slot not in self._free:
            return 0
        source, found = slot, 0
        for other, known in self._known.items():
            same = _common(known, hashes)
            if same > found:
                source, found = other, same
        aside = source in self._free
        self._known[slot] = []  # until the copy is complete
        self._free.discard(slot)
        if found:
            self._copy(source, slot, found * BLOCK_SIZE, aside=aside)
        self._known[slot] = list(hashes[:found])
        return found * BLOCK_SIZE

    def know(self, slot: int, hashes: Sequence[bytes]) -> None:
        """See Room.know."""
        self._known[slot] = list(hashes)

    def leave(self, slot: int) -> None:
        """See Room.leave."""
        if slot not in self._known or slot in self._free:
            return
        known, self._known[slot] = self._known[slot], []
        self._free.add(slot)
        if known:
            for row, head in zip(self._rows, self._heads, strict=True):
                head[slot] = row[slot, :, : self._aside]
        self._known[slot] = known

    def _copy(self, source: int, slot: int, tokens: int, *, aside: bool) -> None:
        for row, head in zip(self._rows, self._heads, strict=True):
            if source != slot:
                row[slot, :, :tokens] = row[source, :, :tokens]
            if aside:
                row[slot, :, : self._aside] = head[source]


def _common(a: Sequence[bytes], b: Sequence[bytes]) -> int:
    """How many leading elements are equal."""
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

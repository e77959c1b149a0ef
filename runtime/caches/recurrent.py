"""States of a model's recurrent layers, per slot: the memory that cannot be cut off like keys and values."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tandemrt.engines.contract.contract import BLOCK_SIZE, Contract
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.device.backends.base import Call, Engine, SplitEngine

STATES = ("past_state.", "past_recent.")  # beginnings of their names in a contract


def is_recurrent(contract: Contract) -> bool:
    """Whether a decoder has recurrent layers."""
    return any(binding.name == "state_index" for binding in contract.inputs)


class RecurrentStates:
    """The states of a decoder's recurrent layers, and the tokens that they cover, over a linear or a paged cache.

    A call replays the tokens after those of the state, up to its ``write_index``, and moves the state to
    ``commit_index`` (docs/operators.md, linear_attention). Rejected drafts leave no trace, because only the tokens
    before ``write_index`` are replayed. ``engine``: the decoder, of which other processes may have a part.

    Attributes:
        tensors: the states and recent tokens of all layers, [slots, ...], by their contract names.
        waits: whether to read a number, the host waits for all work of the device.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], slots: int, device: torch.device, engine: Engine | None = None
    ) -> None:
        self.tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(STATES)}
        self._caches = tensors
        self._split = engine if isinstance(engine, SplitEngine) else None
        self.waits = not device_of(device).on_host
        self._covered = torch.zeros(slots, dtype=torch.int64, device=device)
        self._commit = torch.zeros(slots, dtype=torch.int64, device=device)

    def indices(self, start: int, count: int) -> dict[str, torch.Tensor]:
        """Return the bindings of slots [start, start + count) that locate the states in their texts."""
        end = start + count
        return {"state_index": self._covered[start:end], "commit_index": self._commit[start:end]}

    def committing(self, call: Call, slot: int, final: torch.Tensor, certain: int) -> Call:
        """Return ``call`` over the slots from ``slot`` on, which moves their states to ``final`` + ``certain``."""
        where = self.indices(slot, len(final))
        return _CommittingCall(call, where["state_index"], where["commit_index"], final, certain)

    def with_runs(self, call: Call, runs: "PromptRuns") -> Call:
        """Return ``call`` after work that moves the states of ``runs`` to the last token of each run.

        The work first copies their indices to ``runs.covered``, because a window of the same slot reads the new one.
        """
        return _CallWithRuns(call, self._covered, runs)

    def clear(self, slot: int) -> None:
        """Reset the states of ``slot`` to the beginning of a text."""
        for tensor in self.tensors.values():
            tensor[slot].zero_()
        self.restart([slot])

    def restart(self, slots: Iterable[int]) -> None:
        """Reset the indices of ``slots`` alone: operators of paged caches read no state at index 0."""
        for _, adjacent in groupby(enumerate(sorted(slots)), lambda item: item[1] - item[0]):
            numbers = [slot for _, slot in adjacent]
            self._covered[numbers[0] : numbers[-1] + 1].zero_()  # an assignment would wait for the device

    def covered(self, slot: int) -> int:
        """Return how many tokens the state of ``slot`` covers. The host waits for the device."""
        return int(self._covered[slot])

    def copy(self, slot: int, place: int) -> "Snapshot":
        """Enqueue a copy of the states of ``slot``. It replaces an earlier copy with the number ``place``."""
        if self._split is not None:
            self._split.keep_states(self._caches, slot, place)
        tensors = tuple(tensor[slot].clone() for tensor in self.tensors.values())
        return Snapshot(place, self._covered[slot].clone(), tensors)

    def restore(self, slot: int, snapshot: "Snapshot") -> None:
        """Set the states of ``slot`` to a copy of them."""
        for tensor, saved in zip(self.tensors.values(), snapshot.tensors, strict=True):
            tensor[slot].copy_(saved)
        if self._split is not None:
            self._split.restore_states(self._caches, slot, snapshot.place)
        self._covered[slot].copy_(snapshot.covered)


@dataclass(frozen=True)
class PromptRuns:
    """Runs of prompts in a packed call, by their names in a contract; ``covered`` is ``prompt_state_index``."""

    slots: torch.Tensor
    starts: torch.Tensor
    index: torch.Tensor
    covered: torch.Tensor


@dataclass(frozen=True)
class Snapshot:
    """The states of one slot, which cover ``covered`` tokens, and the inputs of the tokens that follow.

    ``place``: the number of the copy.
    """

    place: int
    covered: torch.Tensor
    tensors: tuple[torch.Tensor, ...]


@dataclass
class _Copies:
    """The copies of all models at the end of a block. ``checked``: they are known to be there."""

    of_models: list[Snapshot]
    checked: bool


class Snapshots:
    """States at the ends of blocks, by the hash of the last block, for prompts that begin with these blocks.

    A state is found only at the block ends where a copy was taken: where a chunk of a prompt ended. Their
    number is bounded; the one that was unused for the longest time goes first. Where the host would wait for the
    device, a copy is checked when a prompt could use it.
    """

    def __init__(self) -> None:
        self._models: list[RecurrentStates] = []  # the states of target and draft
        self._held: OrderedDict[bytes, _Copies] = OrderedDict()
        self._most = 0

    def __bool__(self) -> bool:
        """Whether any model has recurrent layers."""
        return bool(self._models)

    def add(self, states: RecurrentStates, most: int) -> None:
        """Manage the states of a further model, too, and hold at most ``most`` copies of all."""
        self._models.append(states)
        self._most = most

    def clear(self, slot: int) -> None:
        """Reset all states of ``slot`` to the beginning of a text."""
        for states in self._models:
            states.clear(slot)

    def restart(self, slots: Collection[int]) -> None:
        """Reset the indices of ``slots`` alone; see RecurrentStates.restart."""
        for states in self._models:
            states.restart(slots)

    def take(self, slot: int, hashes: Sequence[bytes]) -> None:
        """Copy the states of ``slot``, which are at the end of the blocks with ``hashes``, or one token before it.

        States elsewhere are not copied, or their copy is never used.
        """
        if not hashes or not self._models:
            return
        checked = not any(states.waits for states in self._models)
        if checked and not all(_is_at(len(hashes), states.covered(slot)) for states in self._models):
            return
        snapshot = self._held.pop(hashes[-1], None)
        if snapshot is None or not snapshot.checked:
            if len(self._held) == self._most:
                self._held.popitem(last=False)
            used = {copies.of_models[0].place for copies in self._held.values()}
            place = next(place for place in range(self._most) if place not in used)
            snapshot = _Copies([states.copy(slot, place) for states in self._models], checked)
        self._held[hashes[-1]] = snapshot

    def longest(self, hashes: Sequence[bytes]) -> int:
        """Return the number of leading ``hashes`` at whose end a copy was taken; 0 if there is none."""
        for count in range(len(hashes), 0, -1):
            copies = self._held.get(hashes[count - 1])
            if copies is None:
                continue
            copies.checked = copies.checked or all(_is_at(count, int(copy.covered)) for copy in copies.of_models)
            if copies.checked:
                return count
            del self._held[hashes[count - 1]]
        return 0

    def restore(self, slot: int, name: bytes) -> None:
        """Set all states of ``slot`` to the copy at the end of the block with hash ``name``."""
        self._held.move_to_end(name)
        for states, copy in zip(self._models, self._held[name].of_models, strict=True):
            states.restore(slot, copy)


def _is_at(blocks: int, covered: int) -> bool:
    """Whether states that cover ``covered`` tokens can continue a text after ``blocks`` blocks."""
    return blocks * BLOCK_SIZE - 1 <= covered <= blocks * BLOCK_SIZE


@dataclass(frozen=True)
class _CommittingCall:
    call: Call
    covered: torch.Tensor
    commit: torch.Tensor
    final: torch.Tensor
    certain: int

    def run(self) -> None:
        torch.add(self.final, self.certain, out=self.commit)
        self.call.run()
        self.covered.copy_(self.commit)


@dataclass(frozen=True)
class _CallWithRuns:
    call: Call
    covered: torch.Tensor
    runs: PromptRuns

    def run(self) -> None:
        runs = self.runs
        torch.index_select(self.covered, 0, runs.slots, out=runs.covered)
        # Runs without tokens are at index 0 of slot 0, and end before what any state covers.
        torch.raise_entries(self.covered, runs.slots, runs.index + (runs.starts[1:] - runs.starts[:-1]) - 1)
        self.call.run()

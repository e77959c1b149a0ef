"""States of a model's recurrent layers, per slot: the memory of linear caches that cannot be cut off."""

from collections.abc import Mapping
from dataclasses import dataclass

from tandemrt.engines.contract.contract import Contract
from tandemrt.plugins.tensors import torch
from tandemrt.runtime.device.backends.base import Call

_KINDS = ("past_state.", "past_recent.")


def is_recurrent(contract: Contract) -> bool:
    """Whether a decoder has recurrent layers."""
    return any(binding.name == "state_index" for binding in contract.inputs)


class RecurrentStates:
    """The states of a decoder's recurrent layers, and the tokens that they cover.

    A call replays the tokens after those of the state, up to its ``write_index``, and moves the state to
    ``commit_index`` (docs/operators.md, gated_delta_net). Rejected drafts leave no trace, because only the tokens
    before ``write_index`` are replayed.

    Attributes:
        tensors: the states and recent tokens of all layers, [slots, ...], by their contract names.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], slots: int, device: torch.device) -> None:
        self.tensors = {name: tensor for name, tensor in tensors.items() if name.startswith(_KINDS)}
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

    def clear(self, slot: int) -> None:
        """Reset the states of ``slot`` to the beginning of a text."""
        for tensor in self.tensors.values():
            tensor[slot].zero_()
        self._covered[slot] = 0


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

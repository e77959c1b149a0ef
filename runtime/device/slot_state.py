"""Per-slot state on the device: position in the text and sampling parameters."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from tandemrt.engines.contract.sampling_parameters import SAMPLING_PARAMETERS
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.runtime.device.streams import upload

SlotParams = Mapping[str, float]
"""The sampling parameters of one request by name, in the form of the operators: ``SlotState.INTEGERS`` and ``FLOATS``.

``seed`` is an unsigned 64-bit integer, reinterpreted as signed. ``draft_temperature`` is the draft model's temperature,
0 where it drafts greedily.
"""


class SlotOccupant(Protocol):
    """A request in a slot, as far as the device needs it."""

    slot: int

    def slot_params(self) -> SlotParams:
        """The sampling parameters."""


class SlotPosition(NamedTuple):
    """Position of a slot: ``length`` tokens are in the caches, and ``last`` is the next token, not cached yet."""

    slot: int
    length: int
    last: int
    previous: int

    @classmethod
    def of(cls, slot: int, tokens: Sequence[int], length: int) -> "SlotPosition":
        """The position after ``length`` cached ``tokens``. ``previous`` repeats a token that has none before it."""
        return cls(slot, length, last=tokens[length], previous=tokens[max(0, length - 1)])


class SlotState:
    """One array per value, indexed by slot, so that the first ``batch`` slots are contiguous views.

    ``length``: number of tokens in the target's cache. ``newest`` [slots, 2]: the last two tokens of the text; the last
    one, at index ``length``, is not cached yet. ``position``: index of the token that the first row of a draft window
    decides, ``length`` + 1.
    """

    PLACE = ("length", "position")
    INTEGERS = tuple(name for name, p in SAMPLING_PARAMETERS.items() if p.dtype == "int64" and name != "position")
    FLOATS = (*(name for name, p in SAMPLING_PARAMETERS.items() if p.dtype == "float32"), "draft_temperature")

    def __init__(self, slots: int, device: torch.device) -> None:
        self.newest = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        all_integers = torch.zeros(len(self.PLACE) + len(self.INTEGERS), slots, dtype=torch.int64, device=device)
        self._place, self._integers = all_integers[: len(self.PLACE)], all_integers[len(self.PLACE) :]
        self._all_integers = all_integers  # one tensor, so that one operation clears a slot
        pairs = (len(self.FLOATS) + 1) // 2  # two floats are uploaded as the bits of an integer
        self._floats = torch.zeros(2 * pairs, slots, dtype=torch.float32, device=device)
        self._rows = dict(zip((*self.PLACE, *self.INTEGERS), all_integers, strict=True))
        self._rows |= dict(zip(self.FLOATS, self._floats, strict=False))
        self._ramp = torch.arange(2, device=device)
        self._staged = torch.zeros(slots, len(SlotPosition._fields) + 1, dtype=torch.int64, device=device)
        self._pending_params: dict[int, SlotParams] = {}  # by slot: parameters that are not on the device yet
        self._staged_params = torch.zeros(slots, 1 + len(self.INTEGERS) + pairs, dtype=torch.int64, device=device)

    def view(self, name: str, batch: int) -> torch.Tensor:
        """The values of slots [0, batch), shape [batch]."""
        row: torch.Tensor = self._rows[name]
        return row[:batch]

    def sampling(self, batch: int) -> dict[str, torch.Tensor]:
        """The sampling bindings of verification, by their contract names."""
        return {name: self.view(name, batch) for name in SAMPLING_PARAMETERS}

    def drafting(self, batch: int) -> dict[str, torch.Tensor]:
        """The sampling bindings of drafting, which may have its own temperature."""
        return self.sampling(batch) | {"temperature": self.view("draft_temperature", batch)}

    def join(self, running: SlotOccupant) -> None:
        """See SlotListener.join."""
        self.set_params(running.slot, running.slot_params())

    def set_params(self, slot: int, params: SlotParams) -> None:
        """Set the sampling parameters of ``slot``; ``flush_params`` uploads them."""
        self._pending_params[slot] = params

    def flush_params(self) -> None:
        """Upload all parameters that were set since the last call, in one copy."""
        if not self._pending_params:
            return
        pending, self._pending_params = self._pending_params, {}
        integers = [(slot, *(params[name] for name in self.INTEGERS)) for slot, params in pending.items()]
        floats = np.zeros((len(pending), len(self._floats)), np.float32)
        floats[:, : len(self.FLOATS)] = [[params[name] for name in self.FLOATS] for params in pending.values()]
        staged = self._staged_params[: len(integers)]
        upload(np.concatenate([np.array(integers), floats.view(np.int64)], 1), staged)
        slots, first = staged[:, 0], 1 + len(self.INTEGERS)
        self._integers.index_copy_(1, slots, staged[:, 1:first].T)
        self._floats.index_copy_(1, slots, viewed(staged[:, first:], torch.float32).T)

    def place(self, places: Sequence[SlotPosition]) -> None:
        """Set the positions of slots. The work that fills their caches must be enqueued before."""
        values = self._staged[: len(places)]
        upload([(each.slot, each.length, each.length + 1, each.previous, each.last) for each in places], values)
        slots = values[:, 0]
        self._place.index_copy_(1, slots, values[:, 1:3].T)
        self.newest.index_copy_(0, slots, values[:, 3:])

    def leave(self, slot: int) -> None:
        """See SlotListener.leave. The free ``slot`` has length 0 and samples greedily."""
        # Free slots share the scratch block of a paged cache. They all write the same values, so a CUDA graph can be
        # compared with its warm-up bit by bit.
        self._pending_params.pop(slot, None)
        self.newest[slot].zero_()
        self._all_integers[:, slot].zero_()
        self._floats[:, slot].zero_()

    def advance(self, tokens: torch.Tensor, count: torch.Tensor) -> None:
        """Append the emitted tokens: the first ``count`` [batch] of ``tokens`` [batch, window+1]."""
        newest = self.newest[: len(count)]
        # In [newest, emitted tokens], the new last two tokens are at `count` and `count` + 1.
        torch.gather(torch.cat([newest, tokens], 1), 1, count[:, None] + self._ramp, out=newest)
        self._place[:, : len(count)].add_(count)

    def advance_tensors(self, batch: int) -> dict[str, torch.Tensor]:
        """The tensors that ``advance`` updates: ``length``, ``position`` [batch], ``newest`` [batch, 2]."""
        return {**{name: self.view(name, batch) for name in self.PLACE}, "newest": self.newest[:batch]}

"""Per-slot state on the device: position in the text and sampling parameters."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import cycle
from typing import NamedTuple, Protocol

import numpy as np

from tandemrt.engines.contract.sampling_parameters import SAMPLING_PARAMETERS
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.runtime.device.buffers import StagedBuffer

SlotParams = Mapping[str, float]
"""The sampling parameters of one request by name, in the form of the operators: ``SlotState.INTEGERS`` and ``FLOATS``.

``seed`` is an unsigned 64-bit integer, reinterpreted as signed. ``draft_temperature`` is the draft model's temperature,
0 where it drafts greedily.
"""


class SlotOccupant(Protocol):
    """A request in a slot, as far as the device needs it."""

    slot: int
    tokens: list[int]
    prefilled: int

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
        integers = (*self.PLACE, *self.INTEGERS)
        self._integers = torch.zeros(len(integers), slots, dtype=torch.int64, device=device)
        pairs = (len(self.FLOATS) + 1) // 2  # two floats are uploaded as the bits of an integer
        self._floats = torch.zeros(2 * pairs, slots, dtype=torch.float32, device=device)
        self._rows = dict(zip(integers, self._integers, strict=True))
        self._rows |= dict(zip(self.FLOATS, self._floats, strict=False))
        self._ramp = torch.arange(2, device=device)
        # By slot, what the host has set last: the slot, the integers, the last two tokens, the floats.
        self._newest_at, self._floats_at = 1 + len(integers), 3 + len(integers)
        self._host = np.zeros((slots, self._floats_at + pairs), np.int64)
        self._host[:, 0] = range(slots)
        self._host_floats = self._host[:, self._floats_at :].view(np.float32)
        # Two, because a round over a linear cache uploads twice and must not wait for the first copy.
        staging = [StagedBuffer(self._host.size, torch.int64, device) for _ in range(2)]
        self._staging = cycle([(staged, cache(partial(self._staged_parts, staged.device))) for staged in staging])
        self._changed: set[int] = set()  # slots with values that are not on the device yet

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
        self.place(SlotPosition.of(running.slot, running.tokens, running.prefilled))

    def leave(self, slot: int) -> None:
        """See SlotListener.leave. The free ``slot`` has length 0 and samples greedily."""
        # Free slots share the scratch block of a paged cache. They all write the same values, so a CUDA graph can be
        # compared with its warm-up bit by bit.
        self._host[slot, 1:] = 0
        self._changed.add(slot)

    def set_params(self, slot: int, params: SlotParams) -> None:
        """Set the sampling parameters of ``slot``, which has to be placed before ``flush``."""
        self._host[slot, 1 + len(self.PLACE) : self._newest_at] = [params[name] for name in self.INTEGERS]
        self._host_floats[slot, : len(self.FLOATS)] = [params[name] for name in self.FLOATS]
        self._changed.add(slot)

    def place(self, position: SlotPosition) -> None:
        """Set the position of a slot. The work that fills its caches must be enqueued before ``flush``."""
        row = self._host[position.slot]
        row[1 : 1 + len(self.PLACE)] = position.length, position.length + 1
        row[self._newest_at : self._floats_at] = position.previous, position.last
        self._changed.add(position.slot)

    def flush(self) -> None:
        """Upload all values of the slots that have changed since the last call, in one copy."""
        if not self._changed:
            return
        changed, self._changed = sorted(self._changed), set()
        values, (staged, parts) = self._host[changed], next(self._staging)
        staged.host[: values.size] = values.reshape(-1)
        staged.copy_in(0, values.size)
        slots, integers, newest, floats = parts(len(changed))
        self._integers.index_copy_(1, slots, integers)
        self.newest.index_copy_(0, slots, newest)
        self._floats.index_copy_(1, slots, floats)

    def _staged_parts(self, staged: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """Return views of the first ``count`` rows of ``staged``: slots, integers, newest tokens, floats."""
        columns = self._host.shape[1]
        values = staged[: count * columns].view(count, columns)
        newest, floats = values[:, self._newest_at : self._floats_at], values[:, self._floats_at :]
        return values[:, 0], values[:, 1 : self._newest_at].T, newest, viewed(floats, torch.float32).T

    def advance(self, tokens: torch.Tensor, count: torch.Tensor) -> None:
        """Append the emitted tokens: the first ``count`` [batch] of ``tokens`` [batch, window+1]."""
        newest = self.newest[: len(count)]
        # In [newest, emitted tokens], the new last two tokens are at `count` and `count` + 1.
        torch.gather(torch.cat([newest, tokens], 1), 1, count[:, None] + self._ramp, out=newest)
        self._integers[: len(self.PLACE), : len(count)].add_(count)

    def advance_tensors(self, batch: int) -> dict[str, torch.Tensor]:
        """The tensors that ``advance`` updates: ``length``, ``position`` [batch], ``newest`` [batch, 2]."""
        return {**{name: self.view(name, batch) for name in self.PLACE}, "newest": self.newest[:batch]}

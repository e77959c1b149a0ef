"""What the device knows of each slot: where it stands in its text and how it samples."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tandemrt.plugins.tensors import torch, viewed
from tandemrt.runtime.device import upload
from tandemrt.runtime.requests.request import SlotParams
from tandemrt.runtime.requests.running import Running


class Place(NamedTuple):
    """Where a slot stands: ``length`` tokens of its text are in the caches; behind them, in none, stands ``last``."""

    slot: int
    length: int
    last: int
    previous: int

    @classmethod
    def of(cls, slot: int, tokens: Sequence[int], length: int) -> "Place":
        """The place of a text of ``tokens``. One of a single token has no previous one, so it is repeated."""
        return cls(slot, length, last=tokens[length], previous=tokens[max(0, length - 1)])


class SlotState:
    """One value per slot, structure of arrays, so that the first ``batch`` slots are contiguous views.

    ``length``: tokens of the text in the target's cache. ``newest`` [slots, 2]: the token before the last and the last
    one, decided but in no cache yet; it sits at index ``length`` of the text. ``position``: of the token that the
    first row of a window decides, ``length`` + 1.
    """

    PLACE = ("length", "position")
    INTEGERS = ("top_k", "seed", "rule")
    FLOATS = ("temperature", "top_p", "min_p", "draft_temperature")

    def __init__(self, slots: int, device: torch.device) -> None:
        self.newest = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        all_integers = torch.zeros(len(self.PLACE) + len(self.INTEGERS), slots, dtype=torch.int64, device=device)
        self._place, self._integers = all_integers[: len(self.PLACE)], all_integers[len(self.PLACE) :]
        self._all_integers = all_integers  # one piece of memory, so that a slot is emptied at once
        self._floats = torch.zeros(len(self.FLOATS), slots, dtype=torch.float32, device=device)
        self._rows = dict(zip((*self.PLACE, *self.INTEGERS), all_integers, strict=True))
        self._rows |= dict(zip(self.FLOATS, self._floats, strict=True))
        self._ramp = torch.arange(2, device=device)
        self._staged = torch.zeros(slots, len(Place._fields) + 1, dtype=torch.int64, device=device)
        self._joined: dict[int, SlotParams] = {}  # of slots that the device has not heard of
        self._staged_params = torch.zeros(
            slots, 1 + len(self.INTEGERS) + len(self.FLOATS) // 2, dtype=torch.int64, device=device
        )

    def view(self, name: str, batch: int) -> torch.Tensor:
        """The values of slots [0, batch), shape [batch]."""
        row: torch.Tensor = self._rows[name]
        return row[:batch]

    def sampling(self, batch: int) -> dict[str, torch.Tensor]:
        """The bindings that verification and drafting share, under their contract names."""
        names = ("temperature", "top_p", "min_p", *self.INTEGERS, "position")
        return {name: self.view(name, batch) for name in names}

    def drafting(self, batch: int) -> dict[str, torch.Tensor]:
        """The same for drafting, whose temperature may be one of its own."""
        return self.sampling(batch) | {"temperature": self.view("draft_temperature", batch)}

    def join(self, running: Running) -> None:
        """See SlotListener.join."""
        self.sample(running.slot, running.request.slot_params())

    def sample(self, slot: int, params: SlotParams) -> None:
        """Let ``slot`` sample as ``params`` say, from ``settle`` on."""
        self._joined[slot] = params

    def settle(self) -> None:
        """Tell the device how those slots sample that changed since it was last told: all in one copy."""
        if not self._joined:
            return
        integers = [(slot, *(getattr(each, name) for name in self.INTEGERS)) for slot, each in self._joined.items()]
        floats = [[getattr(each, name) for name in self.FLOATS] for each in self._joined.values()]
        self._joined = {}
        staged = self._staged_params[: len(integers)]
        upload(np.concatenate([np.array(integers), np.array(floats, np.float32).view(np.int64)], 1), staged)
        slots, first = staged[:, 0], 1 + len(self.INTEGERS)
        self._integers.index_copy_(1, slots, staged[:, 1:first].T)
        self._floats.index_copy_(1, slots, viewed(staged[:, first:], torch.float32).T)

    def place(self, places: Sequence[Place]) -> None:
        """Say where slots stand once the caches hold so much of their texts."""
        values = self._staged[: len(places)]
        upload([(each.slot, each.length, each.length + 1, each.previous, each.last) for each in places], values)
        slots = values[:, 0]
        self._place.index_copy_(1, slots, values[:, 1:3].T)
        self.newest.index_copy_(0, slots, values[:, 3:])

    def leave(self, slot: int) -> None:
        """See SlotListener.leave. ``slot`` stands at the beginning, sampling greedily, until a new request gets it."""
        # Free slots share the scratch block of a paged cache: with one text for all of them, which of them writes last
        # changes nothing, so a round's graph can be held to the bits of its warm-up.
        self._joined.pop(slot, None)
        self.newest[slot].zero_()
        self._all_integers[:, slot].zero_()
        self._floats[:, slot].zero_()

    def advance(self, tokens: torch.Tensor, count: torch.Tensor) -> None:
        """Move on by what verification emitted: ``tokens`` [batch, window+1], of which ``count`` [batch] are valid."""
        newest = self.newest[: len(count)]
        # Behind the two newest tokens stand the emitted ones: the newest two are those at `count` and `count` + 1.
        torch.gather(torch.cat([newest, tokens], 1), 1, count[:, None] + self._ramp, out=newest)
        self._place[:, : len(count)].add_(count)

    def moving(self, batch: int) -> dict[str, torch.Tensor]:
        """What ``advance`` changes of slots [0, batch): ``length`` and ``position`` [batch], ``newest`` [batch, 2]."""
        return {**{name: self.view(name, batch) for name in self.PLACE}, "newest": self.newest[:batch]}

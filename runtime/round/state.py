"""What the device knows of each slot: where it stands in its text and how it samples."""

from dataclasses import dataclass

import torch

from tandemrt.runtime.device import upload


@dataclass(frozen=True)
class SlotParams:
    """How one request samples, as the operators take it (engines/contract.py)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int  # bits of an unsigned 64-bit integer, as a signed one
    rule: int


class SlotState:
    """One value per slot, structure of arrays, so that the first ``batch`` slots are contiguous views.

    ``length``: tokens of the text in the target's cache. ``newest`` [slots, 2]: the token before the last and the last
    one, decided but in no cache yet; it sits at index ``length`` of the text. ``position``: of the token that the
    first row of a window decides, ``length`` + 1.
    """

    INTEGERS = ("length", "position", "top_k", "seed", "rule")
    FLOATS = ("temperature", "top_p", "min_p")

    def __init__(self, slots: int, device: torch.device) -> None:
        self.newest = torch.zeros(slots, 2, dtype=torch.int64, device=device)
        self._integers = torch.zeros(len(self.INTEGERS), slots, dtype=torch.int64, device=device)
        self._floats = torch.zeros(len(self.FLOATS), slots, dtype=torch.float32, device=device)
        self._rows = dict(zip(self.INTEGERS, self._integers, strict=True))
        self._rows |= dict(zip(self.FLOATS, self._floats, strict=True))
        self._ramp = torch.arange(2, device=device)

    def view(self, name: str, batch: int) -> torch.Tensor:
        """The values of slots [0, batch), shape [batch]."""
        row: torch.Tensor = self._rows[name]
        return row[:batch]

    def sampling(self, batch: int) -> dict[str, torch.Tensor]:
        """The bindings that verification and drafting share, under their contract names."""
        return {name: self.view(name, batch) for name in (*self.FLOATS, "top_k", "seed", "rule", "position")}

    def admit(self, slot: int, params: SlotParams) -> None:
        """Give ``slot`` to a new request."""
        upload([params.top_k, params.seed, params.rule], self._integers[2:5, slot])
        upload([params.temperature, params.top_p, params.min_p], self._floats[:, slot])

    def place(self, slot: int, *, length: int, last: int, previous: int) -> None:
        """Say where ``slot`` stands after a part of its prompt went into the caches."""
        upload([length, length + 1], self._integers[:2, slot])
        upload([previous, last], self.newest[slot])

    def vacate(self, slot: int) -> None:
        """Let ``slot`` stand at the beginning, sampling greedily, until a new request gets it."""
        # Free slots share the scratch block of a paged cache: with one text for all of them, which of them writes last
        # changes nothing, so a round's graph can be held to the bits of its warm-up.
        self.newest[slot].zero_()
        self._integers[:, slot].zero_()
        self._floats[:, slot].zero_()

    def advance(self, tokens: torch.Tensor, count: torch.Tensor) -> None:
        """Move on by what verification emitted: ``tokens`` [batch, window+1], of which ``count`` [batch] are valid."""
        newest = self.newest[: len(count)]
        # Behind the two newest tokens stand the emitted ones: the newest two are those at `count` and `count` + 1.
        torch.gather(torch.cat([newest, tokens], 1), 1, count[:, None] + self._ramp, out=newest)
        self._integers[:2, : len(count)].add_(count)

    def moving(self, batch: int) -> dict[str, torch.Tensor]:
        """What ``advance`` changes of slots [0, batch): ``length`` and ``position`` [batch], ``newest`` [batch, 2]."""
        return {**{name: self.view(name, batch) for name in ("length", "position")}, "newest": self.newest[:batch]}

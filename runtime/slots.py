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

    ``length``: tokens of the text in the target's cache. ``last``: the newest token, decided but in no cache yet; it
    sits at index ``length`` of the text. ``previous``: the token before it.
    """

    INTEGERS = ("length", "last", "previous", "top_k", "seed", "rule", "position")
    FLOATS = ("temperature", "top_p", "min_p")

    def __init__(self, slots: int, device: torch.device) -> None:
        self._integers = torch.zeros(len(self.INTEGERS), slots, dtype=torch.int64, device=device)
        self._floats = torch.zeros(len(self.FLOATS), slots, dtype=torch.float32, device=device)
        self._rows = dict(zip(self.INTEGERS, self._integers, strict=True))
        self._rows |= dict(zip(self.FLOATS, self._floats, strict=True))

    def view(self, name: str, batch: int) -> torch.Tensor:
        """The values of slots [0, batch), shape [batch]."""
        row: torch.Tensor = self._rows[name]
        return row[:batch]

    def sampling(self, batch: int) -> dict[str, torch.Tensor]:
        """The bindings that verification and drafting share, under their contract names."""
        return {name: self.view(name, batch) for name in (*self.FLOATS, "top_k", "seed", "rule", "position")}

    def admit(self, slot: int, params: SlotParams) -> None:
        """Give ``slot`` to a new request."""
        upload([params.top_k, params.seed, params.rule], self._integers[3:6, slot])
        upload([params.temperature, params.top_p, params.min_p], self._floats[:, slot])

    def place(self, slot: int, *, length: int, last: int, previous: int) -> None:
        """Say where ``slot`` stands after a part of its prompt went into the caches."""
        upload([length, last, previous], self._integers[:3, slot])

    def advance(self, tokens: torch.Tensor, count: torch.Tensor) -> None:
        """Move on by what verification emitted: ``tokens`` [batch, window+1], of which ``count`` [batch] are valid."""
        length, last, previous = (self.view(name, len(count)) for name in ("length", "last", "previous"))
        newest = tokens.gather(1, (count - 1).clamp_(min=0)[:, None])[:, 0]
        before = tokens.gather(1, (count - 2).clamp_(min=0)[:, None])[:, 0]
        previous.copy_(torch.where(count >= 2, before, torch.where(count == 1, last, previous)))
        last.copy_(torch.where(count >= 1, newest, last))
        length.add_(count)

"""The adjusted tokens of a round on their way to the device: one piece of memory, one copy."""

from math import prod

import numpy as np

from tandemrt.engines.errors import InternalError
from tandemrt.plugins.tensors import torch, viewed
from tandemrt.runtime.device import host_tensor
from tandemrt.runtime.requests.penalties import Listed, Penalties

_LEAST = 64  # columns of a call: few widths, so that few calls are bound and captured
_COLUMNS = ("entry_tokens", "entry_counts", "entry_in_prompt", "entry_bias")
_VALUES = ("entry_len", "presence", "frequency", "repetition")
_FLOATS = ("entry_bias", "presence", "frequency", "repetition")


class Entries:
    """What contract.adjust reads beside logits and drafts, for at most ``slots`` rows of ``most`` entries.

    ``columns`` is how many columns the call of this round has: a power of two, or 0 if no request asks for any.
    """

    def __init__(self, slots: int, most: int, device: torch.device) -> None:
        self._most = _width(most)
        size = slots * (len(_COLUMNS) * self._most + len(_VALUES))
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = host_tensor(size, dtype=torch.int32, device=device)
        self.columns = 0
        self._batch = 0
        self._rows: dict[int, tuple[Penalties, Listed]] = {}

    def begin(self, batch: int) -> None:
        """Let the slots of [0, ``batch``) list nothing."""
        self._batch = batch
        self._rows.clear()

    def add(self, slot: int, penalties: Penalties, listed: Listed) -> None:
        """Let the request in ``slot`` list its entries in this round. Raises InternalError if they do not fit."""
        if len(listed.bias) > self._most:
            raise InternalError(f"entries: at most {self._most} fit a row, received {len(listed.bias)}")
        self._rows[slot] = penalties, listed

    def write(self) -> None:
        """Lay out what was added."""
        self.columns = _width(max(len(listed.bias) for _, listed in self._rows.values())) if self._rows else 0
        if not self._rows:
            return
        arrays = {name: tensor.numpy() for name, tensor in _views(self._host, self._batch, self.columns).items()}
        arrays["entry_len"][:] = 0
        for slot, (penalties, (columns, bias)) in self._rows.items():
            count = len(bias)
            for name, values in zip(_COLUMNS, (*columns, bias), strict=True):
                arrays[name][slot, :count] = values
            numbers = (np.int32(count), penalties.presence, penalties.frequency, penalties.repetition)
            for name, value in zip(_VALUES, numbers, strict=True):
                arrays[name][slot] = value

    def copy_in(self) -> None:
        """Enqueue the copy of what was written."""
        size = self._batch * (len(_COLUMNS) * self.columns + len(_VALUES))
        if self.columns:
            self.device[:size].copy_(self._host[:size], non_blocking=True)

    def view(self, batch: int, columns: int) -> dict[str, torch.Tensor]:
        """The bindings of a call, on the device."""
        return _views(self.device, batch, columns)


def _views(memory: torch.Tensor, batch: int, columns: int) -> dict[str, torch.Tensor]:
    views, start = {}, 0
    shapes = [(name, (batch, columns)) for name in _COLUMNS] + [(name, (batch,)) for name in _VALUES]
    for name, shape in shapes:
        part = memory[start : start + prod(shape)].view(shape)
        views[name] = viewed(part, torch.float32) if name in _FLOATS else part
        start += prod(shape)
    return views


def _width(entries: int) -> int:
    return max(_LEAST, 1 << (entries - 1).bit_length())

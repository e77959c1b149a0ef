"""Inputs for logit biases and penalties of a round, in one buffer that is copied to the device at once."""

from math import prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.plugins.tensors.dtypes import viewed

_MIN_COLUMNS = 64  # minimum width of a call; few widths keep the number of bound and captured calls small
_COLUMNS = ("entry_tokens", "entry_counts", "entry_in_prompt", "entry_bias")
_VALUES = ("entry_len", "presence", "frequency", "repetition")  # the last three as in AdjustEntries
_FLOATS = ("entry_bias", "presence", "frequency", "repetition")


class AdjustEntries(NamedTuple):
    """The tokens of one request whose logits a round adjusts, and its penalties. Valid for one round."""

    columns: npt.NDArray[np.int32]  # [3, entries]: token id, count in the output, 1 if in the prompt
    bias: npt.NDArray[np.float32]  # [entries]
    presence: float
    frequency: float
    repetition: float


class AdjustBuffers:
    """The inputs of the engine "adjust", except logits and drafts: at most ``max_entries`` entries per slot.

    ``columns``: width of this round's call, a power of two; 0 if no request adjusts logits.
    """

    def __init__(self, slots: int, max_entries: int, device: torch.device) -> None:
        self._max_entries = _padded(max_entries)
        size = slots * (len(_COLUMNS) * self._max_entries + len(_VALUES))
        self.device = torch.zeros(size, dtype=torch.int32, device=device)
        self._host = device_of(device).host_zeros(size, dtype=torch.int32)
        self.columns = 0
        self._batch = 0
        self._rows: dict[int, AdjustEntries] = {}

    def begin(self, batch: int) -> None:
        """Clear the entries of slots [0, ``batch``)."""
        self._batch = batch
        self._rows.clear()

    def add(self, slot: int, entries: AdjustEntries) -> None:
        """Set the entries of ``slot`` for this round. Raises InternalError if they do not fit."""
        if len(entries.bias) > self._max_entries:
            raise InternalError(f"entries: at most {self._max_entries} fit a row, received {len(entries.bias)}")
        self._rows[slot] = entries

    def write(self) -> None:
        """Write the added entries into host memory."""
        self.columns = _padded(max(len(entries.bias) for entries in self._rows.values())) if self._rows else 0
        if not self._rows:
            return
        arrays = {name: tensor.numpy() for name, tensor in _views(self._host, self._batch, self.columns).items()}
        arrays["entry_len"][:] = 0
        for slot, (columns, bias, *penalties) in self._rows.items():
            count = len(bias)
            for name, values in zip(_COLUMNS, (*columns, bias), strict=True):
                arrays[name][slot, :count] = values
            for name, value in zip(_VALUES, (np.int32(count), *penalties), strict=True):
                arrays[name][slot] = value

    def copy_in(self) -> None:
        """Enqueue the copy of the written entries to the device."""
        size = self._batch * (len(_COLUMNS) * self.columns + len(_VALUES))
        if self.columns:
            self.device[:size].copy_(self._host[:size], non_blocking=True)

    def view(self, batch: int, columns: int) -> dict[str, torch.Tensor]:
        """The device tensors that a call of this size binds."""
        return _views(self.device, batch, columns)


def _views(memory: torch.Tensor, batch: int, columns: int) -> dict[str, torch.Tensor]:
    views, start = {}, 0
    shapes = [(name, (batch, columns)) for name in _COLUMNS] + [(name, (batch,)) for name in _VALUES]
    for name, shape in shapes:
        part = memory[start : start + prod(shape)].view(shape)
        views[name] = viewed(part, torch.float32) if name in _FLOATS else part
        start += prod(shape)
    return views


def _padded(entries: int) -> int:
    return max(_MIN_COLUMNS, 1 << (entries - 1).bit_length())

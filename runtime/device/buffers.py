"""The tensors of a round: allocated once at the largest size, viewed in the shape of each call."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache, partial
from math import prod
from typing import Any

import numpy.typing as npt

from tandemrt.engines.contract.masks import mask_words
from tandemrt.engines.parameters.sampling import MOST_BIASES
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.runtime.device.adjust_buffers import AdjustBuffers

_COPIES = 256  # different copies whose views are kept, per StagedBuffer


class Buffer:
    """Flat device memory, viewed in the shape of a call; with a host copy where the host reads or writes it.

    On a CPU the host copy is the same memory, and nothing is copied.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, host: bool = False) -> None:
        size = prod(shape)
        self.device = torch.zeros(size, dtype=dtype, device=device)
        self._shared = device_of(device).on_host
        self.host = None
        if host:
            self.host = self.device if self._shared else device_of(device).host_zeros(size, dtype=dtype)
        # Views are cached, because a round uses dozens of them, of few shapes.
        self.view: Callable[..., torch.Tensor] = cache(partial(_first, self.device))
        """The first elements on the device, contiguous, in the given shape."""
        self.host_view: Callable[..., torch.Tensor] = cache(partial(_first, self.host))
        """The same elements of the host copy."""

    def copy_in(self, *shape: int) -> None:
        """Enqueue the copy from the host to the device."""
        if self._shared:
            return
        self.view(*shape).copy_(self.host_view(*shape), non_blocking=True)

    def copy_part_in(self, start: int, end: int) -> None:
        """Enqueue the copy of elements [start, end) from the host to the device; none if end <= start."""
        assert self.host is not None
        if end <= start or self._shared:
            return
        self.device[start:end].copy_(self.host[start:end], non_blocking=True)

    def copy_out(self, *shape: int) -> None:
        """Enqueue the copy from the device to the host."""
        if self._shared:
            return
        self.host_view(*shape).copy_(self.view(*shape), non_blocking=True)


def _first(memory: torch.Tensor | None, *shape: int) -> torch.Tensor:
    assert memory is not None, "this buffer has no host copy"
    return memory[: prod(shape)].view(shape)


class StagedBuffer:
    """Flat device memory of which the host rewrites parts: into host memory first, then with one copy to the device.

    The host may write again at any time, because ``host`` waits for the last copy. Calls of torch are few: each lets
    other threads have the interpreter for a switch interval.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.device = torch.zeros(size, dtype=dtype, device=device)
        self._staged = device_of(device).host_zeros(size, dtype=dtype)
        self._values = self._staged.numpy()
        self._has_passed, self._copied = device_of(device).has_passed, device_of(device).new_event()
        self._ends_of_copy = lru_cache(_COPIES)(lambda start, end: (self.device[start:end], self._staged[start:end]))

    @property
    def host(self) -> npt.NDArray[Any]:
        """The host memory, to write."""
        if not self._has_passed(self._copied):
            self._copied.synchronize()
        return self._values

    def copy_in(self, start: int, end: int) -> None:
        """Enqueue the copy of elements [start, end) from the host to the device."""
        target, source = self._ends_of_copy(start, end)
        target.copy_(source, non_blocking=True)
        if self._copied is not None:
            self._copied.record()


class RoundBuffers:
    """The tensors that a round reads and writes, for at most ``slots`` rows of ``window`` drafted tokens.

    ``length``: maximum tokens of a text. ``chunk``: maximum prompt tokens of a call over a linear cache. ``packed``:
    maximum prompt tokens of a call over a paged cache, including padding. ``features``: width of the target's hidden
    states that a draft head reads, 0 for none.

    Attributes:
        num_drafted: tokens per row that the drafter has proposed in the round.
    """

    def __init__(
        self,
        *,
        slots: int,
        window: int,
        vocab: int,
        length: int,
        chunk: int,
        dtype: torch.dtype,
        device: torch.device,
        features: int = 0,
        packed: int = 0,
    ) -> None:
        rows = window + 1
        self.window = window
        self.num_drafted = 0
        self.words = mask_words(vocab)
        self.chunk = Buffer((chunk,), torch.int64, device)
        self.token_ids = Buffer((slots, rows), torch.int64, device)
        self.draft_tokens = Buffer((slots, rows), torch.int64, device, host=True)
        self.draft_len = Buffer((slots,), torch.int64, device, host=True)
        self.bitmask = Buffer((slots, rows, self.words), torch.int32, device, host=True)
        self.logits = Buffer((slots, rows, vocab), dtype, device)
        self.features = Buffer((slots * rows + packed, features), dtype, device) if features else None
        self.prompt_features = Buffer((chunk, features), dtype, device) if features else None
        self.tokens = Buffer((slots, rows), torch.int64, device, host=True)
        self.count = Buffer((slots,), torch.int64, device, host=True)
        self.entries = AdjustBuffers(slots, min(vocab, length + window + MOST_BIASES), device)


def write_drafts(buffer: Buffer, batch: int, window: int, drafts: Mapping[int, Sequence[int]]) -> None:
    """Write ``drafts`` by row into [batch, window] and enqueue their copy to the device.

    Positions without a draft hold -1, which equals no token of the target.
    """
    replace_drafts(buffer, batch, window, {row: drafts.get(row, ()) for row in range(batch)})


def replace_drafts(buffer: Buffer, batch: int, window: int, drafts: Mapping[int, Sequence[int]]) -> None:
    """Write the rows of ``drafts`` as ``write_drafts`` does. The other rows must be on the host."""
    rows = buffer.host_view(batch, window).numpy()
    for row, tokens in drafts.items():
        rows[row] = [*tokens, *[-1] * (window - len(tokens))]
    buffer.copy_in(batch, window)

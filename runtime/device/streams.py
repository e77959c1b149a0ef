"""The two streams of a device, for work and for copies. The host waits for the device only here."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import host_floats


class Streams:
    """Orders work and copies on one device with two streams and events.

    Copies between host and device run on the second stream, concurrently with the work; ``upload`` uses the work
    stream. On a CPU, work is done when its call returns, so ``wait`` returns at once. ``waits`` counts its calls.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waits = 0
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._copies: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the work stream current in the calling thread; engines opened inside the block use it."""
        if self._stream is None:
            yield
            return
        with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    def copies(self, *, after_work: bool) -> AbstractContextManager[None]:
        """Enqueue copies on the second stream. ``after_work``: they wait for all work enqueued so far."""
        return self._copying(after_work) if self._cuda else nullcontext()

    @contextmanager
    def _copying(self, after_work: bool) -> Iterator[None]:
        if after_work:
            self._copies.wait_event(_event(self._stream))
        with torch.cuda.stream(self._copies):
            yield

    def record_copies(self) -> Any:
        """Record an event after the copies enqueued so far; None on a CPU."""
        return _event(self._copies) if self._cuda else None

    def wait_for_copies_on_device(self) -> None:
        """Make later work wait on the device for the copies enqueued so far."""
        if self._cuda:
            self._stream.wait_event(_event(self._copies))

    def wait(self, event: Any) -> None:
        """Block the host until the device has reached ``event``."""
        self.waits += 1
        if event is not None:
            event.synchronize()


def host_tensor(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a zeroed host tensor for copies from and to ``device``; pinned for a GPU."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


class HostCopy:
    """A snapshot of device values for the host: taken with the work, copied with the round's other copies."""

    def __init__(self, source: torch.Tensor) -> None:
        self._values = source.clone()
        self._host: torch.Tensor | None = None

    def copy_out(self) -> None:
        """Enqueue the copy to the host. Call inside Streams.copies; the snapshot must live until the copy is done."""
        values = self._values
        if values.device.type == "cpu":
            self._host = values
            return
        self._host = host_tensor(*values.shape, dtype=values.dtype, device=values.device)
        self._host.copy_(values, non_blocking=True)

    def floats(self) -> npt.NDArray[np.float32]:
        """Return the values as float32, after the host has waited for the copy."""
        if self._host is None:
            raise InternalError("values of the device are read before their copy to the host")
        return host_floats(self._host)


def upload(values: Sequence[Any] | npt.NDArray[Any], target: torch.Tensor) -> None:
    """Enqueue the copy of host ``values``, nested sequences or an array, into ``target`` of the same shape.

    The staging tensor may be freed at once: torch keeps pinned memory until the copies from it are done.
    """
    staged: Any = torch.tensor(values, dtype=target.dtype)  # a torch tensor, because it can be pinned
    target.copy_(staged.pin_memory() if target.device.type == "cuda" else staged, non_blocking=True)


def _event(stream: Any) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event

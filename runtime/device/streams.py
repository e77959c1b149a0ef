"""The two streams of a device, for work and for copies. The host waits for the device only here."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.plugins.tensors.dtypes import host_floats


class Streams:
    """Orders work and copies on one device with two streams and events.

    Copies between host and device run on the second stream, concurrently with the work; ``upload`` uses the work
    stream. On a CPU, work is done when its call returns, so ``wait`` returns at once. ``waits`` counts its calls.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waits = 0
        self._device = device_of(device)
        self._stream = self._device.new_stream()
        self._copies = self._device.new_stream()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the work stream current in the calling thread; engines opened inside the block use it."""
        if self._device.on_host:
            yield
            return
        with torch.inference_mode(), self._device.on_device(), self._device.on_stream(self._stream):
            yield

    def copies(self, *, after_work: bool) -> AbstractContextManager[None]:
        """Enqueue copies on the second stream. ``after_work``: they wait for all work enqueued so far."""
        return nullcontext() if self._device.on_host else self._copying(after_work)

    @contextmanager
    def _copying(self, after_work: bool) -> Iterator[None]:
        if after_work:
            self._device.wait_on_device(self._copies, self._device.record(self._stream))
        with self._device.on_stream(self._copies):
            yield

    def record_copies(self) -> Any:
        """Record an event after the copies enqueued so far; None on a CPU."""
        return self._device.record(self._copies)

    def wait_for_copies_on_device(self) -> None:
        """Make later work wait on the device for the copies enqueued so far."""
        self._device.wait_on_device(self._stream, self._device.record(self._copies))

    def wait(self, event: Any) -> None:
        """Block the host until the device has reached ``event``."""
        self.waits += 1
        if event is not None:
            event.synchronize()


class HostCopy:
    """A snapshot of device values for the host: taken with the work, copied with the round's other copies."""

    def __init__(self, source: torch.Tensor) -> None:
        self._values = source.clone()
        self._host: torch.Tensor | None = None

    def copy_out(self) -> None:
        """Enqueue the copy to the host. Call inside Streams.copies; the snapshot must live until the copy is done."""
        values = self._values
        device = device_of(values.device)
        if device.on_host:
            self._host = values
            return
        self._host = device.host_zeros(*values.shape, dtype=values.dtype)
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
    target.copy_(device_of(target.device).pinned(staged), non_blocking=True)

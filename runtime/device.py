"""A device's clock: marks in its order of work, a second stream for copies, and the only place where the host waits."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy.typing as npt

from tandemrt.plugins.tensors import torch


class Clock:
    """The order of work on one device: marks in it, and waits for them.

    What a round sends to the host and back travels on a stream of its own, beside the work; ``upload`` stays in the
    order of the work. On a CPU work is done when it returns, so a wait costs nothing but is counted.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.waits = 0
        self._cuda = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]
        self._copies: Any = torch.cuda.Stream(device) if self._cuda else None  # type: ignore[no-untyped-call]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make this clock's stream the calling thread's current one; engines opened inside keep to it."""
        if self._stream is None:
            yield
            return
        with torch.inference_mode(), torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            yield

    @contextmanager
    def copies(self, *, behind: bool) -> Iterator[None]:
        """Enqueue copies on the second stream: ``behind`` the work enqueued so far, or beside it."""
        if not self._cuda:
            yield
            return
        if behind:
            self._copies.wait_event(_event(self._stream))
        with torch.cuda.stream(self._copies):
            yield

    def mark_copies(self) -> Any:
        """Mark the copies enqueued so far."""
        return _event(self._copies) if self._cuda else None

    def join(self) -> None:
        """Let work that is enqueued from now on wait for the copies enqueued so far."""
        if self._cuda:
            self._stream.wait_event(_event(self._copies))

    def wait(self, mark: Any) -> None:
        """Block the host until what was marked is done."""
        self.waits += 1
        if mark is not None:
            mark.synchronize()


def host_tensor(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A zeroed host tensor for traffic with ``device``: pinned where that makes copies asynchronous."""
    return torch.zeros(*shape, dtype=dtype, pin_memory=device.type == "cuda")


def upload(values: Sequence[Any] | npt.NDArray[Any], target: torch.Tensor) -> None:
    """Enqueue the copy of host ``values``, of any nesting, into ``target`` of their shape.

    The staging tensor may be dropped at once: torch keeps pinned memory until the copies from it are done.
    """
    staged = torch.tensor(values, dtype=target.dtype)
    target.copy_(staged.pin_memory() if target.device.type == "cuda" else staged, non_blocking=True)


def _event(stream: Any) -> Any:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(stream)
    return event

"""What code that runs on every device asks of it; the methods here are those of the host."""

import mmap
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from tandemrt.engines.contract.gpus import Capability
from tandemrt.plugins.tensors import torch


class Device:
    """The host: work is done when its call returns, so there are no streams, events and graphs.

    Another device is a subclass.

    Attributes:
        on_host: tensors are in host memory, and work is done when its call returns.
        handle: the device in torch.
    """

    on_host = True

    def __init__(self, handle: torch.device) -> None:
        self.handle = handle

    def numbered(self, offset: int = 0) -> torch.device:  # noqa: ARG002
        """Return, with its number, the device that is ``offset`` after this one. All of the host are the same."""
        return self.handle

    @property
    def name(self) -> str:
        """The name of the model of the device."""
        return "CPU"

    @property
    def capability(self) -> Capability:
        """The compute capability; (0, 0) on the host."""
        return 0, 0

    @property
    def processors(self) -> int:
        """The number of multiprocessors; of cores on the host."""
        return os.cpu_count() or 1

    # Streams and events: None on the host.

    def new_stream(self) -> Any:
        """Return a stream of work."""
        return None

    def current_stream(self) -> int:
        """Return the address of the stream that work of this thread is enqueued on."""
        return 0

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Enqueue the work of a block on ``stream``."""
        return nullcontext()

    def on_device(self) -> AbstractContextManager[Any]:
        """Make the device current in the calling thread for a block."""
        return nullcontext()

    def select(self) -> None:
        """Make the device current in the calling thread."""

    def new_event(self) -> Any:
        """Return an event that is not recorded yet."""
        return None

    def record(self, stream: Any) -> Any:  # noqa: ARG002
        """Return an event after the work that is enqueued on ``stream``."""
        return None

    def wait_on_device(self, stream: Any, event: Any) -> None:
        """Make later work of ``stream`` wait for ``event``."""

    def synchronize(self) -> None:
        """Block the host until the current stream has done its work."""

    def timestamp(self) -> Any:
        """Return a point in time of the current stream, for the next two methods."""
        return time.perf_counter()

    def has_passed(self, timestamp: Any) -> bool:  # noqa: ARG002
        """Return whether the device has reached ``timestamp``."""
        return True

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds between two timestamps that have passed."""
        return float(end - start)

    # Memory.

    def host_zeros(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a zeroed host tensor for copies from and to the device: pinned, if copies are faster then."""
        return torch.zeros(*shape, dtype=dtype)

    def pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a host tensor as copies to the device need it."""
        return tensor

    def total_memory(self) -> int:
        """Return the bytes of memory."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def used_memory(self) -> int | None:
        """Return the bytes in use: of this process on the host, of all processes on a GPU; None: not measurable."""
        statm = Path("/proc/self/statm")
        return int(statm.read_text().split()[1]) * mmap.PAGESIZE if statm.is_file() else None

    def free_memory(self) -> int:
        """Return the bytes that a process may still take."""
        try:
            lines = Path("/proc/meminfo").read_text().splitlines()
            fields: dict[str, Any] = dict(line.split(":", 1) for line in lines)
            return int(fields["MemAvailable"].split()[0]) * 1024
        except (OSError, KeyError, ValueError):  # not Linux
            return self.total_memory() // 2

    def release_memory(self) -> None:
        """Give memory that no tensor uses back to the system."""

    # Graphs: the host has none.

    def capture(self, work: Callable[[], None], *, waits: bool, memory: Any) -> Any:
        """Return a graph of ``work``, with ``replay``. See runtime/device/graphs.py."""
        raise NotImplementedError

    def is_graph(self, value: Any) -> bool:  # noqa: ARG002
        """Return whether ``value`` is what ``capture`` returns."""
        return False

    def graph_memory(self) -> Any:
        """Return a pool of memory that several graphs allocate from."""
        raise NotImplementedError

    def is_capturing(self) -> bool:
        """Return whether a graph records the work of the current stream."""
        return False

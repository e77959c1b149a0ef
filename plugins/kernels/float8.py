"""What the launchers of operators in float8 share."""

from typing import Any

import torch

from tandemrt.plugins.kernels.module import Launch, current_stream

_MOST_THREADS, _PER_THREAD = 1024, 8


class RowLaunch:
    """One launch, bound: a block of threads for each row of ``first``, [..., width], whose width is a multiple of 8.

    Capturable: a run allocates nothing and reads nothing on the host.
    """

    def __init__(self, kernel: Any, width: int, first: torch.Tensor, *arguments: Any) -> None:
        rows = first.numel() // first.shape[-1]
        threads = min(_MOST_THREADS, -(-width // (32 * _PER_THREAD)) * 32)
        self._device = first.device
        self._launch = Launch(kernel, (rows, 1, 1), (threads, 1, 1), first, *arguments)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))

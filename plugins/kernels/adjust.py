"""``adjust_logits`` on the GPU."""

from collections.abc import Mapping

import numpy as np
import torch

from tandemrt.plugins.kernels.module import KernelModule, Launch, current_stream
from tandemrt.plugins.kernels.verify import DTYPES

_THREADS = 128
_INPUTS = ("entry_tokens", "entry_counts", "entry_in_prompt", "entry_bias", "entry_len")
_PENALTIES = ("presence", "frequency", "repetition")


class AdjustLaunch:
    """One call, bound: the bindings of ``contract.adjust``, of which ``logits`` are changed in place.

    Capturable: a run allocates nothing and reads nothing on the host.
    """

    def __init__(self, module: KernelModule, tensors: Mapping[str, torch.Tensor]) -> None:
        logits = tensors["logits"]
        batch, rows, vocab = logits.shape
        columns = tensors["entry_tokens"].shape[1]
        drafts = tensors["draft_tokens"] if rows > 1 else None  # an empty tensor has no address
        inputs = [drafts, *(tensors[name] for name in (*_INPUTS, *_PENALTIES))]
        sizes = (np.int32(rows), np.int32(vocab), np.int32(columns))
        grid = (-(-columns // _THREADS), batch, 1)
        kernel = module.kernel(f"adjust_{DTYPES[logits.dtype]}")
        self._device = logits.device
        self._launch = Launch(kernel, grid, (_THREADS, 1, 1), *inputs, *sizes, logits)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))

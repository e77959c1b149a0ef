"""``adjust_logits`` on a GPU."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.engines.contract.operators import SCHEMAS
from tandemrt.plugins.kernels.module import KernelModule, Launch, Tensors, current_stream, suffix
from tandemrt.plugins.operators.launch import Context

_THREADS = 128
_ENTRIES = tuple(binding.name for binding in SCHEMAS["adjust_logits"].inputs[2:])  # after the logits and the drafts


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "AdjustLaunch":  # noqa: ARG001
    """Bind the operator; see Launcher in plugins/operators/launch.py."""
    return AdjustLaunch(KernelModule.of(context, "adjust"), tensors)


class AdjustLaunch:
    """One bound call with the bindings of ``contract.adjust``; it changes ``logits`` in place.

    Capturable: a run allocates nothing and reads nothing on the host.
    """

    def __init__(self, module: KernelModule, tensors: Mapping[str, torch.Tensor]) -> None:
        logits = tensors["logits"]
        batch, rows, vocab = logits.shape
        columns = tensors["entry_tokens"].shape[1]
        drafts = tensors["draft_tokens"] if rows > 1 else None  # an empty tensor has no address
        inputs = [drafts, *(tensors[name] for name in _ENTRIES)]
        sizes = (np.int32(rows), np.int32(vocab), np.int32(columns))
        grid = (-(-columns // _THREADS), batch, 1)
        kernel = module.kernel(f"adjust_{suffix(logits)}")
        self._device = logits.device
        self._launch = Launch(kernel, grid, (_THREADS, 1, 1), *inputs, *sizes, logits)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))

"""``swiglu`` on a GPU."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, Tensors, current_stream, suffix
from tandemrt.plugins.operators.launch import Context

_MAX_THREADS, _PER_THREAD = 256, 8


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "SwigluLauncher":  # noqa: ARG001
    """Bind the operator; see Launcher in plugins/operators/launch.py."""
    return SwigluLauncher(KernelModule.of(context, "swiglu"), tensors["gate_up"], tensors["activated"])


class SwigluLauncher:
    """One bound call: ``gate_up`` [..., 2 * width] and ``activated`` [..., width], contiguous, of one dtype.

    Capturable: a run allocates nothing and reads nothing on the host.
    """

    def __init__(self, module: KernelModule, gate_up: torch.Tensor, activated: torch.Tensor) -> None:
        width = activated.shape[-1]
        rows = activated.numel() // width
        if gate_up.shape != (*activated.shape[:-1], 2 * width) or gate_up.dtype != activated.dtype:
            raise ValueError(
                f"gate_up: {activated.dtype}[..., {2 * width}] is needed for activated {tuple(activated.shape)}, "
                f"got {gate_up.dtype}{list(gate_up.shape)}"
            )
        kernel = module.kernel(f"swiglu_{suffix(gate_up)}")
        threads = min(_MAX_THREADS, -(-width // (32 * _PER_THREAD)) * 32)
        grid = (-(-width // (threads * _PER_THREAD)) * rows, 1, 1)  # the first axis takes any number of rows
        self._device = gate_up.device
        arguments, early = (gate_up, np.int32(width), activated), module.architecture >= HOPPER
        self._launch = Launch(kernel, grid, (threads, 1, 1), *arguments, early=early)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))

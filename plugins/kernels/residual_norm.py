"""``residual_norm`` on a GPU."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, Tensors, current_stream, suffix
from tandemrt.plugins.kernels.tensors import check
from tandemrt.plugins.operators.launch import Context

_VECTOR_BYTES = 16  # that a thread reads and writes at once
_MAX_THREADS = 1024


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "ResidualNormLauncher":
    """Bind the operator; see Launcher in plugins/operators/launch.py."""
    return ResidualNormLauncher(KernelModule.of(context, "residual_norm"), tensors, **attributes)


class ResidualNormLauncher:
    """One bound call: all tensors [..., width] are contiguous and of one dtype; ``weight`` float32 [width], width even.

    Capturable: a run allocates nothing and reads nothing on the host.
    """

    def __init__(self, module: KernelModule, tensors: Tensors, *, epsilon: float) -> None:
        x, update, weight, normed, total = (tensors[name] for name in ("x", "update", "weight", "normed", "sum"))
        width = x.shape[-1]
        for name, each in (("x", x), ("update", update), ("normed", normed), ("sum", total)):
            check(name, each, x.dtype, tuple(x.shape))
        check("weight", weight, torch.float32, (width,))
        if width % 2:
            raise ValueError(f"x: an even number of values per token is needed, got {width}")
        vectors = -(-width * x.itemsize // _VECTOR_BYTES)
        self._device = x.device
        self._launch = Launch(
            module.kernel(f"residual_norm_{suffix(x)}"),
            (x.numel() // width, 1, 1),
            (min(_MAX_THREADS, -(-vectors // 32) * 32), 1, 1),
            x,
            update,
            weight,
            np.int32(width),
            np.float32(epsilon),
            normed,
            total,
            early=module.architecture >= HOPPER,
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))

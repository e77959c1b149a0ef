"""Quantization to float8 on a GPU, alone or after an activation or a norm."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tandemrt.plugins.kernels.float8_matmul import FEW
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, Tensors, current_stream, suffix
from tandemrt.plugins.operators.launch import Context

_PER_THREAD = 8  # values at a time
_MAX_THREADS = 512
_MAX_BLOCKS = 8  # most blocks per token
_FULL, _MANY = 64, 256  # tokens that fill every SM with one block each, and with two


def launch_tokens(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "QuantizeLaunch":  # noqa: ARG001
    """Bind the operator; see Launcher in plugins/operators/launch.py."""
    width, rows = _sizes(tensors)
    inputs = (tensors["x"], tensors.get("static_scale"), np.int32(width))
    outputs = (tensors["quantized"], tensors["scales"])
    return QuantizeLaunch(context, "quantize_tokens", rows, _threads(width), *inputs, *outputs)


def launch_swiglu(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "QuantizeLaunch":  # noqa: ARG001
    """Bind the operator. Several blocks share a wide token, unless there are many tokens."""
    width, rows = _sizes(tensors)
    inputs = (tensors[name] for name in ("gate_up", "token_scales", "weight_scales"))
    outputs = (tensors["quantized"], tensors["scales"])
    sweeps, blocks, threads = _work_split(
        width, rows, clusters=KernelModule.of(context, "float8").architecture >= HOPPER
    )
    constants = (tensors.get("static_scale"), np.int32(width))
    kernel = f"quantized_swiglu_{sweeps}"
    return QuantizeLaunch(context, kernel, rows, threads, *inputs, *constants, *outputs, blocks=blocks)


def launch_norm(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "QuantizeLaunch":
    """Bind the operator; see Launcher in plugins/operators/launch.py."""
    width, rows = _sizes(tensors)
    names = ("skip", "update", "token_scales", "weight_scales", "norm_weight")
    inputs = (tensors[name] for name in names)
    sizes = (np.int32(width), np.float32(attributes["epsilon"]))
    outputs = (tensors[name] for name in ("quantized", "scales", "sum"))
    constants = (tensors.get("static_scale"), *sizes)
    return QuantizeLaunch(context, "quantized_norm", rows, _threads(width), *inputs, *constants, *outputs)


class QuantizeLaunch:
    """One bound launch with ``blocks`` blocks per row; the dtype of the first argument selects the kernel.

    A launch of few rows uses programmatic dependent launch, as the matmul after it does (FewRows). Capturable: a run
    allocates nothing and reads nothing on the host.
    """

    def __init__(
        self, context: Context, kernel: str, rows: int, threads: int, first: Any, *rest: Any, blocks: int = 1
    ) -> None:
        module = KernelModule.of(context, "float8")
        function, early = module.kernel(f"{kernel}_{suffix(first)}"), rows <= FEW and module.architecture >= HOPPER
        self._device = first.device
        self._launch = Launch(
            function, (rows * blocks, 1, 1), (threads, 1, 1), first, *rest, cluster=blocks, early=early
        )

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


def _sizes(tensors: Tensors) -> tuple[int, int]:
    """Return the width and the number of rows. Raises ValueError for a width that the kernels do not support."""
    quantized = tensors["quantized"]
    width: int = quantized.shape[-1]
    if width % _PER_THREAD:
        raise ValueError(f"quantized: a width in multiples of {_PER_THREAD} is needed, got {width}")
    return width, quantized.numel() // width


def _work_split(width: int, rows: int, *, clusters: bool) -> tuple[int, int, int]:
    """Return iterations per thread (8 values each), blocks per token, and threads per block."""
    if rows >= _MANY:
        return 4, 1, _threads(-(-width // 4))
    if rows >= _FULL or not clusters:
        return 2, 1, _threads(-(-width // 2), most=2 * _MAX_THREADS)
    blocks = 1
    while blocks < _MAX_BLOCKS and width > 2048 * blocks:
        blocks *= 2
    return 1, blocks, _threads(-(-width // blocks))


def _threads(width: int, most: int = _MAX_THREADS) -> int:
    return min(most, -(-width // (32 * _PER_THREAD)) * 32)

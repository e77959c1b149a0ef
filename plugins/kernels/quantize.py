"""Rounding to float8 on the GPU, by itself or behind an activation or a norm."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tandemrt.plugins.kernels.float8_product import FEW
from tandemrt.plugins.kernels.module import HOPPER, Launch, current_stream, suffix
from tandemrt.plugins.launch import Context, Tensors

_PER_THREAD = 8  # values at a time
_MOST_THREADS = 512
_MOST_BLOCKS = 8  # that can share a token
_FULL, _MANY = 64, 256  # tokens that occupy all processors with a block each, and with two on each processor


def launch_tokens(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "Rounding":  # noqa: ARG001
    """See plugins/launch.py."""
    width, rows = _sizes(tensors)
    inputs = (tensors["x"], tensors.get("static_scale"), np.int32(width))
    outputs = (tensors["quantized"], tensors["scales"])
    return Rounding(context, "quantize_tokens", rows, _threads(width), *inputs, *outputs)


def launch_swiglu(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "Rounding":  # noqa: ARG001
    """See plugins/launch.py. Several blocks share a token, which is wide, unless there are many."""
    width, rows = _sizes(tensors)
    inputs = (tensors[name] for name in ("gate_up", "product_scales", "weight_scales"))
    outputs = (tensors["quantized"], tensors["scales"])
    sweeps, blocks, threads = _form(width, rows, clusters=context.module("float8").architecture >= HOPPER)
    given = (tensors.get("static_scale"), np.int32(width))
    kernel = f"quantized_swiglu_{sweeps}"
    return Rounding(context, kernel, rows, threads, *inputs, *given, *outputs, blocks=blocks)


def launch_norm(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "Rounding":
    """See plugins/launch.py."""
    width, rows = _sizes(tensors)
    names = ("skip", "product", "product_scales", "weight_scales", "norm_weight")
    inputs = (tensors[name] for name in names)
    sizes = (np.int32(width), np.float32(attributes["epsilon"]))
    outputs = (tensors[name] for name in ("quantized", "scales", "sum"))
    given = (tensors.get("static_scale"), *sizes)
    return Rounding(context, "quantized_norm", rows, _threads(width), *inputs, *given, *outputs)


class Rounding:
    """One launch of a kernel, bound, whose first argument has the dtype that it reads, some blocks for each row.

    That of few rows begins early, so that the product behind it can, too (FewRows). Capturable: a run allocates nothing
    and reads nothing on the host.
    """

    def __init__(
        self, context: Context, kernel: str, rows: int, threads: int, first: Any, *rest: Any, blocks: int = 1
    ) -> None:
        module = context.module("float8")
        found, early = module.kernel(f"{kernel}_{suffix(first)}"), rows <= FEW and module.architecture >= HOPPER
        self._device = first.device
        self._launch = Launch(found, (rows * blocks, 1, 1), (threads, 1, 1), first, *rest, cluster=blocks, early=early)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


def _sizes(tensors: Tensors) -> tuple[int, int]:
    """The width of what is rounded, and its rows. Raises ValueError for a width that the kernels do not take."""
    quantized = tensors["quantized"]
    width: int = quantized.shape[-1]
    if width % _PER_THREAD:
        raise ValueError(f"quantized: a width in multiples of {_PER_THREAD} is needed, got {width}")
    return width, quantized.numel() // width


def _form(width: int, rows: int, *, clusters: bool) -> tuple[int, int, int]:
    """Sweeps over a token, 8 values for each thread, then blocks of a token, and their threads."""
    if rows >= _MANY:
        return 4, 1, _threads(-(-width // 4))
    if rows >= _FULL or not clusters:
        return 2, 1, _threads(-(-width // 2), most=2 * _MOST_THREADS)
    blocks = 1
    while blocks < _MOST_BLOCKS and width > 2048 * blocks:
        blocks *= 2
    return 1, blocks, _threads(-(-width // blocks))


def _threads(width: int, most: int = _MOST_THREADS) -> int:
    return min(most, -(-width // (32 * _PER_THREAD)) * 32)

"""Rounding to float8 on the GPU, by itself or behind an activation or a norm."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tandemrt.plugins.kernels.module import Grid, Launch, current_stream, suffix
from tandemrt.plugins.launch import Context, Tensors

_PER_THREAD = 8  # values at a time
_MOST_THREADS = 512
_MOST_BLOCKS = 8  # that can share a token, on a device that has clusters
_CLUSTERS_FROM = 90
_TOGETHER, _MANY = 4, 128  # tokens that blocks share, from so many on


def launch_tokens(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "Rounding":  # noqa: ARG001
    """See plugins/launch.py."""
    width, rows = _sizes(tensors)
    inputs = (tensors["x"], tensors.get("static_scale"), np.int32(width))
    outputs = (tensors["quantized"], tensors["scales"])
    return Rounding(context, "quantize_tokens", (rows, 1, 1), _threads(width), *inputs, *outputs)


def launch_swiglu(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "Rounding":  # noqa: ARG001
    """See plugins/launch.py. Several blocks share a token: it is wide, and at batch 1 it is all there is. Where there
    are many, these share several, since a weight's scales are more bytes than a token."""
    width, rows = _sizes(tensors)
    inputs = (tensors[name] for name in ("gate_up", "product_scales", "weight_scales"))
    outputs = (tensors["quantized"], tensors["scales"])
    clusters = context.module("float8").architecture >= _CLUSTERS_FROM
    blocks = 1
    while clusters and blocks < _MOST_BLOCKS and width > 2048 * blocks:
        blocks *= 2
    threads = _threads(-(-width // blocks))
    together = _TOGETHER if clusters and rows >= _MANY else 1
    grid = (blocks, -(-rows // together), 1)
    kernel = "quantized_swiglu" if together == 1 else f"quantized_swiglu_{together}"
    given = (tensors.get("static_scale"), np.int32(rows), np.int32(width))
    return Rounding(context, kernel, grid, threads, *inputs, *given, *outputs, cluster=blocks)


def launch_norm(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "Rounding":
    """See plugins/launch.py."""
    width, rows = _sizes(tensors)
    names = ("skip", "product", "product_scales", "weight_scales", "norm_weight")
    inputs = (tensors[name] for name in names)
    sizes = (np.int32(width), np.float32(attributes["epsilon"]))
    outputs = (tensors[name] for name in ("quantized", "scales", "sum"))
    given = (tensors.get("static_scale"), *sizes)
    return Rounding(context, "quantized_norm", (rows, 1, 1), _threads(width), *inputs, *given, *outputs)


class Rounding:
    """One launch of a kernel, bound, whose first argument has the dtype that it reads. Capturable: a run allocates
    nothing and reads nothing on the host."""

    def __init__(
        self, context: Context, kernel: str, grid: Grid, threads: int, first: Any, *rest: Any, cluster: int = 1
    ) -> None:
        found = context.module("float8").kernel(f"{kernel}_{suffix(first)}")
        self._device = first.device
        self._launch = Launch(found, grid, (threads, 1, 1), first, *rest, cluster=cluster)

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


def _threads(width: int) -> int:
    return min(_MOST_THREADS, -(-width // (32 * _PER_THREAD)) * 32)

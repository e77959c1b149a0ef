"""``short_convolution`` on a GPU."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tandemrt.plugins.kernels.module import KernelModule, Launch, Tensors, run_in_order, suffix
from tandemrt.plugins.kernels.tensors import check
from tandemrt.plugins.operators.constants import MAX_KERNEL
from tandemrt.plugins.operators.launch import Context

_THREADS, _CHANNELS = 128, 256


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> "ShortConvolutionLauncher":  # noqa: ARG001
    """Bind the operator; see Launcher in plugins/operators/launch.py."""
    return ShortConvolutionLauncher(context, tensors)


class ShortConvolutionLauncher:
    """One bound call of ``short_convolution``; shapes as in ``tandemrt.plugins.reference.linear_attention``.

    A run updates ``recent`` in place. Otherwise as ``LinearAttentionLauncher``.
    """

    def __init__(self, context: Context, tensors: Tensors) -> None:
        projected, recent, weight, out = (tensors[name] for name in ("projected", "recent", "conv_weight", "out"))
        (channels, kernel), (slots, history, _) = weight.shape, recent.shape
        check("projected", projected, projected.dtype, (len(projected), 3 * channels))
        check("recent", recent, projected.dtype, (slots, history, channels))
        check("conv_weight", weight, projected.dtype, (channels, kernel))
        check("conv_bias", tensors["conv_bias"], torch.float32, (channels,))
        check("out", out, projected.dtype, (len(projected), channels))
        if channels % 2 or kernel > min(MAX_KERNEL, history):
            raise ValueError(
                f"conv_weight: an even number of channels and at most {MAX_KERNEL} tokens of a convolution are needed, "
                f"got {list(weight.shape)} and a history of {history}"
            )
        module, across = KernelModule.of(context, "short_convolution"), -(-channels // _CHANNELS)
        convolve = module.kernel(f"short_convolution_{suffix(projected)}")
        keep = module.kernel(f"keep_recent_{suffix(projected)}")
        sizes, block = (np.int32(channels), np.int32(kernel), np.int32(history)), (_THREADS, 1, 1)
        weights = weight, tensors["conv_bias"]

        def convolved(tokens: slice, rows: torch.Tensor | None, runs: tuple[Any, ...], *, keeps: bool) -> Launch:
            part, result = projected[tokens], out[tokens]
            grid = (len(part), across, 1)
            return Launch(convolve, grid, block, part, *weights, rows, *runs, *sizes, np.int32(keeps), recent, result)

        rows = tensors["prompt_rows"]
        windows = len(projected) - len(rows)
        self._device = projected.device
        self._launches: tuple[Launch, ...] = ()
        if len(rows):  # before the windows, which may follow them in the same text
            names = ("prompt_index", "prompt_slots", "prompt_starts")
            runs = (*(tensors[name] for name in names), np.int32(0))
            count, prompts = len(tensors["prompt_slots"]), projected[windows:]
            self._launches = (
                convolved(slice(windows, None), rows, runs, keeps=False),
                Launch(keep, (history, across, count), block, prompts, *runs, sizes[0], sizes[2], recent),
            )
        if windows:
            index = tensors["write_index"]
            window_runs = (index, None, None, np.int32(windows // len(index)))
            self._launches += (convolved(slice(windows), None, window_runs, keeps=True),)

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        run_in_order(self._launches, self._device)

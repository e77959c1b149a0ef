"""``quantize_tokens`` on the GPU."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tandemrt.plugins.kernels.float8 import RowLaunch
from tandemrt.plugins.kernels.module import suffix
from tandemrt.plugins.launch import Context, Tensors


def launch(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> RowLaunch:  # noqa: ARG001
    """See plugins/launch.py."""
    x, quantized, scales = (tensors[name] for name in ("x", "quantized", "scales"))
    width = x.shape[-1]
    kernel = context.module("float8").kernel(f"quantize_tokens_{suffix(x)}")
    return RowLaunch(kernel, width, x, tensors.get("static_scale"), np.int32(width), quantized, scales)

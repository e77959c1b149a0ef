"""``tiled_matmul`` in standard operators; it runs where no C compiler builds the kernel."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body
from tandemrt.plugins.operators.float_tiles import OUTPUTS


def tiled_matmul() -> ir.Function:
    """x [..., inner] → out [..., width] in float32."""
    body = Body.of("tiled_matmul")
    x, weight = body.inputs
    by_tile = body.op("Reshape", weight.cast(FLOAT32), np.array([0, -1, OUTPUTS], np.int64))
    by_input = body.op("Transpose", by_tile, perm=[1, 0, 2])  # inputs, tiles, outputs of a tile
    outputs = body.op("Reshape", by_input, np.array([0, -1], np.int64)).first(body.integer("width"), 1)
    return body.function(out=body.matmul(x, outputs))


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (tiled_matmul(),)

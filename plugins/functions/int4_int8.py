"""``int4_int8_matmul`` in standard operators; see plugins/reference/int4_int8.py.

It runs where no C compiler builds the kernel. Products of 32 inputs are sums of integers, exact in float32.
"""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body, BodyValue
from tandemrt.plugins.functions.int4 import halves
from tandemrt.plugins.operators.int4_interleaved import OUTPUTS, STEP, TINY

_FIRST = np.array([0], np.int64)


def int4_int8_matmul(*, zeros: bool, overload: str = "") -> ir.Function:
    """x [..., inner] → out [..., width] in float32; ``zeros``: with zero points. ``overload``: see int4_matmul."""
    body = Body.of("int4_int8_matmul", without=() if zeros else ("zeros",))
    x, weight, scales, *optional = body.inputs
    words = body.op("Reshape", halves(body, weight), np.array([0, -1, 4, OUTPUTS, 4, 2], np.int64))
    by_step = body.op("Transpose", words, perm=[1, 2, 5, 4, 0, 3])  # step, eight inputs, half, four, tile, output
    integers = body.op("Reshape", by_step, np.array([0, STEP, -1], np.int64)).cast(FLOAT32)
    steps = integers.size(0)
    middles = _by_step(body, optional[0], steps).cast(FLOAT32) if optional else np.float32(8)
    leading = body.op("Slice", body.op("Shape", x), _FIRST, np.array([-1], np.int64))
    rows = body.op("ReduceProd", leading, keepdims=1)
    values, factors = _rounded(body, x, rows, steps)
    exact = body.op("MatMul", values, integers - middles)
    products = exact * (_by_step(body, scales, steps) * factors)
    sums = body.op("ReduceSum", products, _FIRST, keepdims=0)
    width = body.integer("width")
    return body.function(overload, out=body.op("Reshape", sums.first(width, 1), body.concat(leading, width, axis=0)))


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (int4_int8_matmul(zeros="zeros" in present),)


def _rounded(body: Body, x: BodyValue, rows: BodyValue, steps: BodyValue) -> tuple[BodyValue, BodyValue]:
    """Return integers [steps, rows, 32] and their scales [steps, rows, 1], both in float32."""
    step = np.array([STEP], np.int64)
    flat = body.op("Reshape", x, body.concat(rows, x.size(-1), axis=0), allowzero=1)
    missing = steps * step - x.size(-1)
    padded = body.op("Pad", flat, body.concat(np.array([0, 0, 0], np.int64), missing, axis=0))
    split = body.op("Reshape", padded, body.concat(rows, steps, step, axis=0), allowzero=1)
    parts = body.op("Transpose", split, perm=[1, 0, 2])
    largest = body.op("Abs", parts).max_last()
    nothing = (parts * np.float32(0)).sum_last()  # NaN where an input is not finite
    used = (largest > TINY) & nothing.equals(np.float32(0))
    inverse = body.where(used, body.op("Div", np.float32(127), largest), np.float32(0))
    values = body.where(used, body.op("Round", parts * inverse), np.float32(0))
    return values, body.where(used, largest / np.float32(127), nothing)


def _by_step(body: Body, values: BodyValue, steps: BodyValue) -> BodyValue:
    """Return values [tiles, groups * 8] as [steps, 1, tiles * 8]."""
    of_group = body.op("Div", body.integer("group_size"), np.array([STEP], np.int64))
    by_group = body.op("Reshape", values, np.array([0, -1, OUTPUTS], np.int64))
    columns = body.op("Reshape", body.op("Transpose", by_group, perm=[1, 0, 2]), np.array([0, 1, -1], np.int64))
    wide = body.op("Expand", columns, body.concat(np.array([1], np.int64), of_group, np.array([1], np.int64), axis=0))
    return body.op("Reshape", wide, body.concat(np.array([-1, 1], np.int64), columns.size(-1), axis=0)).first(steps, 0)

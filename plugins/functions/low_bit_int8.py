"""``low_bit_int8_matmul`` in standard operators; see plugins/reference/low_bit_int8.py.

It runs where no C compiler builds the kernel. Products of a step, or of half a step with 6 bits, are sums of integers,
exact in float32.
"""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, INT64, UINT8, UINT64, Body, BodyValue
from tandemrt.plugins.functions.int4 import halves
from tandemrt.plugins.operators.low_bit_interleaved import OUTPUTS, RUNS, STEP, TINY

OPTIONAL = ("zeros", "offsets", "subscales", "suboffsets", "table")  # inputs
_FIRST, _STEP, _HALVES = (np.array([value], np.int64) for value in (0, STEP, RUNS // 2))


def low_bit_int8_matmul(present: Collection[str], overload: str = "") -> ir.Function:
    """x [..., inner] → out [..., width] in float32.

    ``present``: the names of the inputs. ``overload``: see int4_matmul.
    """
    body = Body.up_to("low_bit_int8_matmul", present)
    x, width = body["x"], body.integer("width")
    (integers,) = body.branch(
        body.integer("bits").equals(np.array([8], np.int64)),
        lambda: [_by_step(body, body["weight"].cast(FLOAT32))],
        lambda: [_integers(body, body["weight"])],
    )
    steps = integers.size(0)
    leading = body.op("Slice", body.op("Shape", x), _FIRST, np.array([-1], np.int64))
    rows = body.op("ReduceProd", leading, keepdims=1)
    values, factors = _rounded(body, x, rows, steps)

    parts = _halves_of_step(body) + np.int64(1)
    size, count = body.op("Div", _STEP, parts), steps * parts
    split = body.op("Reshape", values, body.concat(steps, rows, parts, size, axis=0), allowzero=1)
    by_part = body.op("Transpose", split, perm=[0, 2, 1, 3])
    values = body.op("Reshape", by_part, body.concat(count, rows, size, axis=0), allowzero=1)
    factors = _repeated(body, factors, parts)
    integers = body.op("Reshape", integers, body.concat(count, size, integers.size(-1), axis=0))

    def of_parts(groups: BodyValue) -> BodyValue:
        return _repeated(body, groups, body.op("Div", body.integer("group_size"), size)).first(count, 0)

    if "zeros" in present:
        integers = integers - of_parts(_by_group(body, body["zeros"]))
    elif "table" in present:
        integers = body.op("Gather", body["table"].cast(FLOAT32), integers.cast(INT64)) - np.float32(128)
    elif "offsets" not in present:
        shift = (body.integer("bits") - np.int64(1)).cast(UINT64)
        integers = integers - body.op("BitShift", np.uint64(1), shift, direction="LEFT").cast(FLOAT32)
    scales = of_parts(_products(body, "scales", "subscales", present))
    products = body.op("MatMul", values, integers) * (scales * factors)
    if "offsets" in present:
        offsets = of_parts(_products(body, "offsets", "suboffsets", present))
        products = products + offsets * (values.sum_last() * factors)
    sums = body.op("ReduceSum", products, _FIRST, keepdims=0)
    return body.function(overload, out=body.op("Reshape", sums.first(width, 1), body.concat(leading, width, axis=0)))


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (low_bit_int8_matmul(present),)


def _halves_of_step(body: Body) -> BodyValue:
    """Return whether the halves of a step may be in different groups, which is so with 6 bits; int64 [1]."""
    return body.integer("bits").equals(np.array([6], np.int64)).cast(INT64)


def _integers(body: Body, weight: BodyValue) -> BodyValue:
    """Return the integers [steps, 32, tiles * 8] in float32; see ``interleaved``."""
    more, eight, word = body.integer("bits") - np.int64(4), np.int64(8), np.array([OUTPUTS * 4], np.int64)
    shape = body.concat(np.array([0, -1], np.int64), more + _HALVES, word, axis=0)
    parts = body.op("Reshape", weight, shape)
    pairs = body.op("Transpose", halves(body, parts.first(_HALVES, 2)), perm=[0, 1, 2, 4, 3])
    runs = body.op("Reshape", pairs, np.array([0, 0, RUNS, -1], np.int64)).cast(FLOAT32)  # tile, step, run, 32 values
    begin = body.op("Mul", np.arange(RUNS), more)  # of a run's upper bits; without such bits the mask is 0
    plane = body.op("Min", body.op("Div", begin, eight) + _HALVES, more + (_HALVES - 1))
    shifts = body.op("Mod", begin, eight).cast(UINT8).expand_dims(-1)
    mask = body.op("BitShift", np.uint64(1), more.cast(UINT64), direction="LEFT").cast(INT64) - np.int64(1)
    upper = (body.op("Gather", parts, plane, axis=2) >> shifts).bits_and(mask.cast(UINT8))
    return _by_step(body, runs + upper.cast(FLOAT32) * np.float32(16))


def _by_step(body: Body, values: BodyValue) -> BodyValue:
    """Return ``values`` of the runs of all tiles, in their order, as [steps, 32, tiles * 8]."""
    tiles = values.size(0)
    split = body.op("Reshape", values, body.concat(tiles, np.array([-1, RUNS, OUTPUTS, 4], np.int64), axis=0))
    by_step = body.op("Transpose", split, perm=[1, 2, 4, 0, 3])
    return body.op("Reshape", by_step, np.array([0, STEP, -1], np.int64))


def _rounded(body: Body, x: BodyValue, rows: BodyValue, steps: BodyValue) -> tuple[BodyValue, BodyValue]:
    """Return integers [steps, rows, 32] and their scales [steps, rows, 1], both in float32."""
    flat = body.op("Reshape", x, body.concat(rows, x.size(-1), axis=0), allowzero=1)
    missing = steps * _STEP - x.size(-1)
    padded = body.op("Pad", flat, body.concat(np.array([0, 0, 0], np.int64), missing, axis=0))
    split = body.op("Reshape", padded, body.concat(rows, steps, _STEP, axis=0), allowzero=1)
    parts = body.op("Transpose", split, perm=[1, 0, 2])
    largest = body.op("Abs", parts).max_last()
    nothing = (parts * np.float32(0)).sum_last()  # NaN where an input is not finite
    used = (largest > TINY) & nothing.equals(np.float32(0))
    inverse = body.where(used, body.op("Div", np.float32(127), largest), np.float32(0))
    values = body.where(used, body.op("Round", parts * inverse), np.float32(0))
    return values, body.where(used, largest / np.float32(127), nothing)


def _products(body: Body, name: str, subname: str, present: Collection[str]) -> BodyValue:
    """Return the values ``name`` of all groups, [groups, 1, tiles * 8], times those of ``subname`` if it is present."""
    values = _by_group(body, body[name])
    if subname not in present:
        return values
    subvalues = _by_group(body, body[subname])
    return _repeated(body, values, body.op("Div", subvalues.size(0), values.size(0))) * subvalues


def _by_group(body: Body, values: BodyValue) -> BodyValue:
    """Return values [tiles, groups * 8] as float32 [groups, 1, tiles * 8]."""
    by_tile = body.op("Reshape", values.cast(FLOAT32), np.array([0, -1, OUTPUTS], np.int64))
    by_group = body.op("Transpose", by_tile, perm=[1, 0, 2])
    return body.op("Reshape", by_group, np.array([0, 1, -1], np.int64))


def _repeated(body: Body, values: BodyValue, times: BodyValue) -> BodyValue:
    """Repeat each item of the first axis of ``values`` [items, rows, columns] ``times`` times."""
    one, shape = np.array([1], np.int64), (values.size(1), values.size(2))
    wide = body.op("Expand", values.expand_dims(1), body.concat(one, times, one, one, axis=0))
    return body.op("Reshape", wide, body.concat(np.array([-1], np.int64), *shape, axis=0), allowzero=0)

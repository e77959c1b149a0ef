"""``int4_matmul`` in standard operators; see plugins/reference/int4.py."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body, BodyValue

_HALF, _LEFT = np.uint8(15), np.uint8(4)


def int4_matmul(*, zeros: bool, prompt_rows: bool = False, overload: str = "") -> ir.Function:
    """x [..., inner] @ w.T in float32, rounded to the dtype of x.

    ``zeros``: with zero points; ``prompt_rows``: with that input. ``overload`` is ONNX's: nodes with the same overload
    use this function among those of its name.
    """
    optional_inputs = {"zeros": zeros, "prompt_rows": prompt_rows}
    body = Body.of("int4_matmul", without=[name for name, there in optional_inputs.items() if not there])
    x, weight, scales, *optional = body.inputs
    values = int4_values(body, weight, scales, optional[0] if zeros else None)
    return body.function(overload, out=body.op("CastLike", matmul_of_values(body, x, values), x))


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (int4_matmul(zeros="zeros" in present, prompt_rows="prompt_rows" in present),)


def from_tiles(body: Body, weight: BodyValue) -> BodyValue:
    """Return the 4-bit integers of ``weight`` in the order of the inputs, [width, ...]; see in_tiles."""
    return by_input(body, halves(body, weight))


def by_input(body: Body, integers: BodyValue) -> BodyValue:
    """Return ``integers`` [width, ...] in the order of the inputs; see by_input of the layout."""
    words = body.op("Reshape", integers, np.array([0, -1, 4, 4, 2, 4], np.int64))
    return body.op("Transpose", words, perm=[0, 1, 3, 2, 5, 4])


def int4_values(
    body: Body, weight: BodyValue, scales: BodyValue, zeros: BodyValue | None, group: str = "group_size"
) -> BodyValue:
    """Return the values of a weight, float32 [width, padded]; ``group``: the attribute with its group size."""
    integers = in_groups(body, from_tiles(body, weight), group).cast(FLOAT32)
    middles = np.float32(8) if zeros is None else _middles(body, zeros, integers.size(1))
    return scaled_groups(body, integers - middles, scales.cast(FLOAT32))


def in_groups(body: Body, values: BodyValue, group: str) -> BodyValue:
    """Return ``values`` [width, ...] as [width, groups, group size], by the operator's attribute ``group``."""
    shape = body.concat(np.array([0, -1], np.int64), body.integer(group), axis=0)
    return body.op("Reshape", values, shape)


def scaled_groups(body: Body, numbers: BodyValue, scales: BodyValue) -> BodyValue:
    """Return ``numbers`` [width, groups, group size] times ``scales`` [width, groups and some padding], flat."""
    scaled = numbers * scales.first(numbers.size(1), 1).expand_dims(-1)
    return body.op("Reshape", scaled, np.array([0, -1], np.int64))


def matmul_of_values(body: Body, x: BodyValue, values: BodyValue) -> BodyValue:
    """Return x @ w.T in float32 for ``values`` [width, padded] of a weight."""
    return body.matmul(x.cast(FLOAT32), body.op("Transpose", values.first(x.size(-1), 1), perm=[1, 0]))


def _middles(body: Body, zeros: BodyValue, groups: BodyValue) -> BodyValue:
    flat = body.op("Reshape", halves(body, zeros), np.array([0, -1], np.int64))
    return flat.first(groups, 1).cast(FLOAT32).expand_dims(-1)


def halves(body: Body, packed: BodyValue) -> BodyValue:
    """Return the 4-bit integers, the low half of a byte first: uint8 [..., bytes] to [..., bytes, 2]."""
    low, high = packed.bits_and(_HALF), packed >> _LEFT
    return body.concat(low.expand_dims(-1), high.expand_dims(-1), axis=-1)

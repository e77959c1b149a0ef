"""``int8_matmul`` in standard operators; see plugins/reference/int8.py."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body, BodyValue
from tandemrt.plugins.functions.int4 import in_groups, matmul_of_values, scaled_groups
from tandemrt.plugins.operators.int8_layout import ORDER, STORED


def int8_matmul(*, prompt_rows: bool = False) -> ir.Function:
    """x [..., inner] @ w.T in float32, rounded to the dtype of x; ``prompt_rows``: with that input."""
    body = Body.of("int8_matmul", without=() if prompt_rows else ("prompt_rows",))
    x, weight, scales, *_ = body.inputs
    out = matmul_of_values(body, x, int8_values(body, weight, scales))
    return body.function(out=body.op("CastLike", out, x))


def int8_values(body: Body, weight: BodyValue, scales: BodyValue, group: str = "group_size") -> BodyValue:
    """Return the values of a weight, float32 [width, padded]; ``group``: the attribute with its group size."""
    integers = in_groups(body, bytes_from_tiles(body, weight), group).cast(FLOAT32)
    return scaled_groups(body, integers - np.float32(128), scales.cast(FLOAT32))


def bytes_from_tiles(body: Body, weight: BodyValue) -> BodyValue:
    """Return the bytes of ``weight`` in the order of the inputs, [width, ...]; see bytes_from_tiles of the layout."""
    half, run, thread, inputs = ORDER
    ordered = body.op("Reshape", weight, np.array([0, -1, half, thread, run, inputs], np.int64))
    return body.op("Transpose", ordered, perm=STORED)


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (int8_matmul(prompt_rows="prompt_rows" in present),)

"""``float4_matmul`` in standard operators; see plugins/reference/float4.py."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.plugins.functions.body import INT64, UINT32, Body, BodyValue
from tandemrt.plugins.functions.float8 import NUMBERS
from tandemrt.plugins.functions.int4 import by_input, in_groups, matmul_of_values, scaled_groups
from tandemrt.plugins.operators.float4 import PLACES, VALUES


def float4_matmul(*, prompt_rows: bool = False) -> ir.Function:
    """x [..., inner] @ w.T in float32, rounded to the dtype of x; ``prompt_rows``: with that input."""
    body = Body.of("float4_matmul", without=() if prompt_rows else ("prompt_rows",))
    x, weight, scales, factors, *_ = body.inputs
    out = matmul_of_values(body, x, float4_values(body, weight, scales)) * factors
    return body.function(out=body.op("CastLike", out, x))


def float4_values(body: Body, weight: BodyValue, scales: BodyValue, group: str = "group_size") -> BodyValue:
    """Return the values of a weight without its factors, float32 [width, padded]; ``group``: as for int4_values."""
    codes = in_groups(body, floats_from_tiles(body, weight), group).cast(ir.DataType.INT32)
    numbers = body.op("Gather", NUMBERS, scales.cast(ir.DataType.INT32))
    return scaled_groups(body, body.op("Gather", VALUES, codes), numbers)


def floats_from_tiles(body: Body, weight: BodyValue) -> BodyValue:
    """Return the codes of ``weight`` in the order of the inputs, uint32 [width, ...]; see floats_in_tiles."""
    octets = body.op("Reshape", weight, np.array([0, -1, 4], np.int64)).cast(INT64)
    words = (octets * np.array([1, 1 << 8, 1 << 16, 1 << 24], np.int64)).sum_last().cast(UINT32)
    lowest, upper, sign = (((words >> places).bits_and(mask)) * np.uint32(1 << bit) for places, mask, bit in PLACES)
    return by_input(body, lowest + upper + sign)


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (float4_matmul(prompt_rows="prompt_rows" in present),)

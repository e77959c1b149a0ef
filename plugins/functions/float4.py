"""``float4_matmul`` in standard operators; see plugins/reference/float4.py."""

from collections.abc import Collection

import onnx_ir as ir

from tandemrt.plugins.functions.body import Body, BodyValue
from tandemrt.plugins.functions.float8 import NUMBERS
from tandemrt.plugins.functions.int4 import from_tiles, in_groups, matmul_of_values, scaled_groups
from tandemrt.plugins.operators.float4 import VALUES


def float4_matmul(*, prompt_rows: bool = False) -> ir.Function:
    """x [..., inner] @ w.T in float32, rounded to the dtype of x; ``prompt_rows``: with that input."""
    body = Body.of("float4_matmul", without=() if prompt_rows else ("prompt_rows",))
    x, weight, scales, factors, *_ = body.inputs
    out = matmul_of_values(body, x, float4_values(body, weight, scales)) * factors
    return body.function(out=body.op("CastLike", out, x))


def float4_values(body: Body, weight: BodyValue, scales: BodyValue, group: str = "group_size") -> BodyValue:
    """Return the values of a weight without its factors, float32 [width, padded]; ``group``: as for int4_values."""
    codes = in_groups(body, from_tiles(body, weight), group).cast(ir.DataType.INT32)
    numbers = body.op("Gather", NUMBERS, scales.cast(ir.DataType.INT32))
    return scaled_groups(body, body.op("Gather", VALUES, codes), numbers)


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (float4_matmul(prompt_rows="prompt_rows" in present),)

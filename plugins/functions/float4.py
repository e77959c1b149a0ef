"""``float4_matmul`` in standard operators; see plugins/reference/float4.py."""

from collections.abc import Collection

import onnx_ir as ir

from tandemrt.plugins.functions.body import Body
from tandemrt.plugins.functions.float8 import NUMBERS
from tandemrt.plugins.functions.int4 import from_tiles, in_groups, matmul_of_groups
from tandemrt.plugins.operators.float4 import VALUES


def float4_matmul(*, prompt_rows: bool = False) -> ir.Function:
    """x [..., inner] @ w.T in float32, rounded to the dtype of x; ``prompt_rows``: with that input."""
    body = Body.of("float4_matmul", without=() if prompt_rows else ("prompt_rows",))
    x, weight, scales, factors, *_ = body.inputs
    codes = in_groups(body, from_tiles(body, weight)).cast(ir.DataType.INT32)
    out = matmul_of_groups(
        body, x, body.op("Gather", VALUES, codes), body.op("Gather", NUMBERS, scales.cast(ir.DataType.INT32))
    )
    return body.function(out=body.op("CastLike", out * factors, x))


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (float4_matmul(prompt_rows="prompt_rows" in present),)

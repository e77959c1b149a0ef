"""``linear`` in standard operators."""

from collections.abc import Collection

import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body


def linear() -> ir.Function:
    """x @ weight.T in float32, rounded to the input's dtype."""
    body = Body.of("linear")
    x, weight = body.inputs
    product = body.op("MatMul", x.cast(FLOAT32), body.op("Transpose", weight.cast(FLOAT32), perm=[1, 0]))
    return body.function(product=body.op("CastLike", product, x))


def bodies(dtype: str, given: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """See plugins/faces.py."""
    return (linear(),)

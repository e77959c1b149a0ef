"""``linear`` in standard operators."""

from collections.abc import Collection

import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body


def linear() -> ir.Function:
    """x @ weight.T in float32, rounded to the input's dtype."""
    body = Body.of("linear")
    x, weight = body.inputs
    out = body.matmul(x.cast(FLOAT32), body.op("Transpose", weight.cast(FLOAT32), perm=[1, 0]))
    return body.function(out=body.op("CastLike", out, x))


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (linear(),)

"""``residual_norm`` in standard operators."""

from collections.abc import Collection

import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body


def residual_norm() -> ir.Function:
    """x and update [..., width] → the norm of their sum, and the sum, both in the dtype of x."""
    body = Body.of("residual_norm")
    x, update, weight = body.inputs
    total = body.op("CastLike", x.cast(FLOAT32) + update.cast(FLOAT32), x)
    epsilon = body.attribute("epsilon", ir.AttributeType.FLOAT, "epsilon")
    normed = body.op("RMSNormalization", total.cast(FLOAT32), weight, epsilon=epsilon, axis=-1)
    return body.function(normed=body.op("CastLike", normed, x), sum=total)


def bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (residual_norm(),)

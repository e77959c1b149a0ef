"""Operators between two float8 matmuls, in standard operators; see plugins/reference/quantized.py."""

from collections.abc import Collection

import onnx_ir as ir

from tandemrt.plugins.functions.body import FLOAT32, Body, BodyValue
from tandemrt.plugins.functions.float8 import rounded


def quantized_swiglu(*, static: bool) -> ir.Function:
    """gate_up [..., 2 * width] without its scales → silu(gate) * up in float8 [..., width], scales float32 [..., 1]."""
    body = Body.of("quantized_swiglu", without=() if static else ("static_scale",))
    gate_up, scales, weight_scales, *optional = body.inputs
    gate, up = body.ops("Split", _scaled(body, gate_up, scales, weight_scales), outputs=2, axis=-1, num_outputs=2)
    activated = body.op("CastLike", gate * body.op("Sigmoid", gate) * up, gate_up)
    quantized, token_scales = rounded(body, activated.cast(FLOAT32), *optional)
    return body.function(quantized=quantized, scales=token_scales)


def quantized_norm(*, static: bool) -> ir.Function:
    """skip and update [..., hidden], update without its scales → the norm of their sum in float8, and the sum."""
    body = Body.of("quantized_norm", without=() if static else ("static_scale",))
    skip, update, scales, weight_scales, weight, *optional = body.inputs
    wide = skip.cast(FLOAT32) + _scaled(body, update, scales, weight_scales)
    total = body.op("CastLike", wide, skip)
    epsilon = body.attribute("epsilon", ir.AttributeType.FLOAT, "epsilon")
    normed = body.op("RMSNormalization", total.cast(FLOAT32), weight.cast(FLOAT32), epsilon=epsilon, axis=-1)
    quantized, token_scales = rounded(body, body.op("CastLike", normed, skip).cast(FLOAT32), *optional)
    return body.function(quantized=quantized, scales=token_scales, sum=total)


def swiglu_bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (quantized_swiglu(static="static_scale" in present),)


def norm_bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (quantized_norm(static="static_scale" in present),)


def _scaled(body: Body, x: BodyValue, scales: BodyValue, weight_scales: BodyValue) -> BodyValue:
    """Return float32 values, rounded to the dtype of ``x`` on the way."""
    return body.op("CastLike", x.cast(FLOAT32) * scales * weight_scales, x).cast(FLOAT32)

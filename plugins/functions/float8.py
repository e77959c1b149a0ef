"""Float8 matmuls in standard operators: quantization, and matmuls with scales and without."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.engines.contract.dtypes import ONNX
from tandemrt.plugins.functions.body import FLOAT32, Body, BodyValue
from tandemrt.plugins.operators.float8 import FLOAT8, FLOAT8_MAX, MIN_SCALE

_FLOAT8 = ir.DataType.FLOAT8E4M3FN
NUMBERS = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)  # by byte


def quantize_tokens(*, static: bool) -> ir.Function:
    """x [..., inner] → quantized float8_e4m3fn [..., inner], scales float32 [..., 1]; see plugins/reference/float8.py.

    ``static``: with the input ``static_scale``, float32 [1].
    """
    body = Body.of("quantize_tokens", without=() if static else ("static_scale",))
    x, *optional = body.inputs
    quantized, scales = rounded(body, x.cast(FLOAT32), *optional)
    return body.function(quantized=quantized, scales=scales)


def float8_matmul(dtype: str) -> ir.Function:
    """quantized @ weight.T in float32, rounded to ``dtype``."""
    body = Body.of("float8_matmul")
    return body.function(out=_matmul(body, *body.inputs).cast(ir.DataType(ONNX[dtype])))


def scaled_matmul(dtype: str) -> ir.Function:
    """(quantized @ weight.T) * scales * weight_scales in float32, rounded to ``dtype``."""
    body = Body.of("scaled_matmul")
    quantized, scales, weight, weight_scales = body.inputs
    out = _matmul(body, quantized, weight) * scales * weight_scales
    return body.function(out=out.cast(ir.DataType(ONNX[dtype])))


def rounded(body: Body, wide: BodyValue, static_scale: BodyValue | None = None) -> tuple[BodyValue, BodyValue]:
    """Return float32 ``wide`` in float8, and the scales of its tokens."""
    largest = body.op("Abs", wide).max_last()
    if static_scale is not None:
        scales = body.op("Expand", static_scale, body.op("Shape", largest))
    else:
        scales = body.op("Max", largest / np.float32(FLOAT8_MAX), np.float32(MIN_SCALE))
    return body.op("Cast", wide / scales, to=int(_FLOAT8), saturate=1), scales


def quantize_bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (quantize_tokens(static="static_scale" in present),)


def scaled_bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (scaled_matmul(dtype),)


def matmul_bodies(dtype: str, present: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """Return the functions; see Function in plugins/operators/launch.py."""
    return (float8_matmul(dtype),)


def _matmul(body: Body, quantized: BodyValue, weight: BodyValue) -> BodyValue:
    numbers = body.op("Gather", NUMBERS, weight.cast(ir.DataType.INT32))
    return body.matmul(quantized.cast(FLOAT32), body.op("Transpose", numbers, perm=[1, 0]))

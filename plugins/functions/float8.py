"""``quantize_tokens`` and ``scaled_product`` in standard operators."""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.engines.dtypes import ONNX
from tandemrt.plugins.functions.body import FLOAT32, Body
from tandemrt.plugins.reference.float8 import FLOAT8, LARGEST, LEAST_SCALE

_FLOAT8 = ir.DataType.FLOAT8E4M3FN


def quantize_tokens(*, static: bool) -> ir.Function:
    """x [..., inner] → quantized float8_e4m3fn [..., inner], scales float32 [..., 1]; see plugins/reference/float8.py.

    ``static``: with the input ``static_scale``, float32 [1].
    """
    body = Body.of("quantize_tokens", without=() if static else ("static_scale",))
    x, *given = body.inputs
    wide = x.cast(FLOAT32)
    largest = body.op("Abs", wide).max_last()
    if given:
        scales = body.op("Expand", given[0], body.op("Shape", largest))
    else:
        scales = body.op("Max", largest / np.float32(LARGEST), np.float32(LEAST_SCALE))
    return body.function(quantized=body.op("Cast", wide / scales, to=int(_FLOAT8), saturate=1), scales=scales)


def scaled_product(dtype: str) -> ir.Function:
    """(quantized @ weight.T) * scales * weight_scales in float32, rounded to ``dtype``."""
    body = Body.of("scaled_product")
    quantized, scales, weight, weight_scales = body.inputs
    numbers = np.arange(256, dtype=np.uint8).view(FLOAT8).astype(np.float32)
    turned = body.op("Transpose", body.op("Gather", numbers, weight.cast(ir.DataType.INT32)), perm=[1, 0])
    product = body.op("MatMul", quantized.cast(FLOAT32), turned) * scales * weight_scales
    return body.function(product=product.cast(ir.DataType(ONNX[dtype])))


def quantize_bodies(dtype: str, given: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """See plugins/faces.py."""
    return (quantize_tokens(static="static_scale" in given),)


def product_bodies(dtype: str, given: Collection[str]) -> tuple[ir.Function, ...]:  # noqa: ARG001
    """See plugins/faces.py."""
    return (scaled_product(dtype),)

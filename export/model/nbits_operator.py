"""onnxruntime's operator MatMulNBits: x @ weight.T for grouped integer weights (export/quantize/).

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from collections.abc import Sequence

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, GraphBuilder, dims_of, width_of
from tandemrt.export.graph.low_bit_format import LowBitFormat


def nbits_operator(
    b: GraphBuilder,
    x: ir.Value,
    weight: Sequence[ir.Value],
    low_bit_format: LowBitFormat,
    *,
    dtype: str,
    width: int,
) -> ir.Value:
    """Append the operator for ``x`` [..., inner] and ``weight`` of Weights.low_bit_tensors; returns [..., width].

    The kernel computes in integers (accuracy level 4): the fastest level, and for 8 bits the only one that rounds all
    rows alike (measured in docs/quantization.md).
    """
    (matmul,) = b.custom(
        "MatMulNBits",
        x,
        *weight,
        domain=LIBRARY,
        outputs=[(dtype, (*dims_of(x)[:-1], width))],
        K=width_of(x),
        N=width,
        bits=low_bit_format.bits,
        block_size=low_bit_format.group_size,
        accuracy_level=4,
    )
    return matmul

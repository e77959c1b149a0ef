"""Matmuls with 4-bit weights on a CPU, by the project's operator ``int4_int8_matmul``."""

from collections.abc import Sequence

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.plugins.functions import int4_int8
from tandemrt.plugins.operators.constants import DOMAIN

_OVERLOADS = {False: "", True: "zeros"}  # by whether there are zero points, which some matmuls of a model may have


def int4_int8_matmul(
    b: GraphBuilder, x: ir.Value, weight: Sequence[ir.Value], low_bit_format: LowBitFormat, *, width: int
) -> ir.Value:
    """Return x @ weight.T, [..., width], for ``x`` [..., inner] and ``weight`` of Weights.low_bit_tensors."""
    zeros = low_bit_format.zeros
    (matmul,) = b.custom(
        "int4_int8_matmul",
        x,
        *weight,
        domain=DOMAIN,
        outputs=[("float32", (*dims_of(x)[:-1], width))],
        group_size=low_bit_format.group_size,
        width=width,
    )
    b.nodes[-1].overload = _OVERLOADS[zeros]
    b.add_function(int4_int8.int4_int8_matmul(zeros=zeros, overload=_OVERLOADS[zeros]))
    return matmul

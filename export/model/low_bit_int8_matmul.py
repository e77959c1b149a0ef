"""Matmuls with weights of 4 to 8 bits on a CPU, by the project's operator ``low_bit_int8_matmul``."""

from collections.abc import Sequence
from functools import partial

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, dims_of, without_trailing_none
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.plugins.functions import low_bit_int8
from tandemrt.plugins.operators.constants import DOMAIN
from tandemrt.plugins.operators.tables4 import TABLES


def low_bit_int8_matmul(
    b: GraphBuilder, x: ir.Value, weight: Sequence[ir.Value], low_bit_format: LowBitFormat, *, width: int
) -> ir.Value:
    """Return x @ weight.T, [..., width], for ``x`` [..., inner] and ``weight`` of Weights.low_bit_tensors."""
    kinds = dict(zip(low_bit_format.shapes(0, 0), weight, strict=True))
    if low_bit_format.table:
        kinds["table"] = b.constant(TABLES[low_bit_format.table].tolist(), "uint8")
    optional = [kinds.get(kind) for kind in low_bit_int8.OPTIONAL]
    overload = "_".join(kind for kind in low_bit_int8.OPTIONAL if kind in kinds)
    (matmul,) = b.custom(
        "low_bit_int8_matmul",
        *without_trailing_none([x, *weight[:2], *optional]),
        domain=DOMAIN,
        outputs=[("float32", (*dims_of(x)[:-1], width))],
        bits=low_bit_format.bits,
        group_size=low_bit_format.group_size,
        width=width,
    )
    b.nodes[-1].overload = overload
    b.add_function("low_bit_int8_matmul", partial(low_bit_int8.low_bit_int8_matmul, kinds, overload), overload)
    return matmul

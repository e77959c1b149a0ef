"""Matmuls with grouped integer weights (export/quantize/) on a CPU."""

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.model.nbits_operator import nbits_operator
from tandemrt.export.model.row_padding import cut, is_padded, needs_padding, pad


def matmul_nbits(
    b: GraphBuilder, x: ir.Value, weight: tuple[ir.Value, ...], low_bit_format: LowBitFormat, *, dtype: str, width: int
) -> ir.Value:
    """Return x @ weight.T, [batch, query, width] for ``x`` [batch, query, inner] and ``weight`` of
    Weights.low_bit_tensors.

    The result of a row does not depend on the other rows (export/model/row_padding.py).
    """
    if is_padded(x) or not needs_padding(low_bit_format):
        return nbits_operator(b, x, weight, low_bit_format, dtype=dtype, width=width)
    tokens = b.op("Shape", x, start=1, end=2)
    matmul = nbits_operator(b, pad(b, x, low_bit_format), weight, low_bit_format, dtype=dtype, width=width)
    return cut(b, matmul, tokens, x)

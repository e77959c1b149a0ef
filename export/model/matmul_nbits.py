"""Matmuls with grouped integer weights (export/quantize/) on a CPU: onnxruntime's MatMulNBits."""

import onnx_ir as ir

from tandemrt.export.graph.builder import LIBRARY, GraphBuilder, dims_of, width_of
from tandemrt.export.graph.low_bit_format import LowBitFormat


def matmul_nbits(
    b: GraphBuilder, x: ir.Value, weight: tuple[ir.Value, ...], low_bit_format: LowBitFormat, *, dtype: str, width: int
) -> ir.Value:
    """Return x @ weight.T, [batch, query, width] for ``x`` [batch, query, inner] and ``weight`` of
    Weights.low_bit_tensors.

    The result of a row does not depend on the other rows. The kernel computes in integers (accuracy level 4): the
    fastest level, and for 8 bits the only one that rounds all rows alike. For 4 bits a tile of a single row is rounded
    differently. Tiles have an even number of rows, so the rows are padded to an even number.
    """
    dims = dims_of(x)
    if low_bit_format.bits == 4:
        query = b.op("Shape", x, start=1, end=2)
        x = _pad_to_even(b, x, query)
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
    if low_bit_format.bits == 4:
        matmul = b.op("Slice", matmul, b.constant([0]), query, b.constant([1]))
        matmul.shape = ir.Shape([*dims[:-1], width])
    return matmul


def _pad_to_even(b: GraphBuilder, x: ir.Value, query: ir.Value) -> ir.Value:
    """``x`` [batch, query, inner] with one more token of zeros per row if the number of tokens is odd."""
    batch, tokens, inner = dims_of(x)
    odd = b.op("Mod", b.op("Mul", b.op("Shape", x, start=0, end=1), query), b.constant([2]))
    even = b.op("Pad", x, b.op("Concat", b.constant([0, 0, 0, 0]), odd, b.constant([0]), axis=0))
    even.shape = ir.Shape([batch, f"even {tokens}", inner])  # onnxruntime plans memory by the names of dimensions
    return even

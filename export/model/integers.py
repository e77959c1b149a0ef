"""Products with weights in blocks of integers (export/quantize/): onnxruntime's MatMulNBits."""

import onnx_ir as ir

from tandemrt.export.model.builder import LIBRARY, GraphBuilder, dims_of, width_of
from tandemrt.export.quantize.blocks import Form


def by_blocks(
    b: GraphBuilder, x: ir.Value, weight: tuple[ir.Value, ...], form: Form, *, dtype: str, width: int
) -> ir.Value:
    """x @ weight.T, [batch, query, inner] to [batch, query, width], for ``weight`` as Weights.blocks gives it.

    A row has the same bits in any company. The kernel computes in integers all the way (accuracy level 4), which is
    the fastest, and in 8 bits the only one that rounds all rows alike. In 4 bits a tile of a single row is rounded in
    another way; tiles are even, so the number of rows is made even.
    """
    dims = dims_of(x)
    if form.bits == 4:
        query = b.op("Shape", x, start=1, end=2)
        x = _even(b, x, query)
    (product,) = b.custom(
        "MatMulNBits",
        x,
        *weight,
        domain=LIBRARY,
        outputs=[(dtype, (*dims_of(x)[:-1], width))],
        K=width_of(x),
        N=width,
        bits=form.bits,
        block_size=form.block,
        accuracy_level=4,
    )
    if form.bits == 4:
        product = b.op("Slice", product, b.constant([0]), query, b.constant([1]))
        product.shape = ir.Shape([*dims[:-1], width])
    return product


def _even(b: GraphBuilder, x: ir.Value, query: ir.Value) -> ir.Value:
    """``x`` [batch, query, inner] with one token more, of zeros, in every row where their number is odd."""
    batch, tokens, inner = dims_of(x)
    odd = b.op("Mod", b.op("Mul", b.op("Shape", x, start=0, end=1), query), b.constant([2]))
    even = b.op("Pad", x, b.op("Concat", b.constant([0, 0, 0, 0]), odd, b.constant([0]), axis=0))
    even.shape = ir.Shape([batch, f"even {tokens}", inner])  # onnxruntime plans memory by the names
    return even

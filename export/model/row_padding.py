"""Padding for 4-bit matmuls of onnxruntime on a CPU, so that a row has the same bits whatever the number of rows is.

onnxruntime's kernels for a lone row, for pairs of rows and for a row that is left over may add the groups of a row in
different orders. Which of them differ depends on the processor and on the group size. So every call compares them on
a small matrix, and adds a token to each row of the batch only where this processor's kernels differ:

| processor | kernels that differ, groups of 32 to 128 |
| --- | --- |
| AVX2 | the one for a lone row (measured) |
| AVX-512 with VNNI | none (read in onnxruntime's source) |

A decoder is padded once, at its token ids. The dimension of padded tokens has a name, by which matmuls know it.
"""

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.model.nbits_operator import nbits_operator

_PADDED = "padded "  # begins the names of padded dimensions
# A kernel has loops over 16 groups, 4 groups and one, and over 16, 4 and one output: the matrix has some of each.
_GROUPS, _OUTPUTS = 21, 21


def needs_padding(low_bit_format: LowBitFormat) -> bool:
    """Return whether matmuls of this format may need padding: those of MatMulNBits. With 8 bits its kernels agree."""
    return low_bit_format.bits == 4 and not low_bit_format.tiles and not low_bit_format.interleaved


def is_padded(x: ir.Value) -> bool:
    """Return whether the tokens of ``x`` [batch, tokens, ...] are padded already."""
    return str(dims_of(x)[1]).startswith(_PADDED)


def pad_ids(
    b: GraphBuilder, values: ir.Value, formats: Collection[LowBitFormat], ids: ir.Value | None = None
) -> ir.Value:
    """Return int64[..., tokens] with one more value per row, a copy of the first, where matmuls of ``formats`` need it.

    ``ids`` [batch, tokens]: the tokens, if ``values`` are others.
    """
    *before, tokens = dims_of(values)
    missing = _missing(b, values if ids is None else ids, formats)
    more = b.op("Slice", values, b.constant([0]), missing, b.constant([len(before)]))
    padded = b.op("Concat", values, more, axis=len(before))
    padded.shape = ir.Shape([*before, f"{_PADDED}{tokens}"])  # onnxruntime plans memory by the names of dimensions
    return padded


def pad(b: GraphBuilder, x: ir.Value, low_bit_format: LowBitFormat) -> ir.Value:
    """Return ``x`` [batch, tokens, inner] with one more token of zeros per row where matmuls of the format need it."""
    return _with_zeros(b, x, _missing(b, x, [low_bit_format]), f"{_PADDED}{dims_of(x)[1]}")


def pad_as(b: GraphBuilder, x: ir.Value, tokens: ir.Value, padded: ir.Value) -> ir.Value:
    """Return ``x`` [batch, tokens, inner] with as many tokens as ``padded`` has; ``tokens``: int64[1], of ``x``."""
    name = dims_of(padded)[1]
    missing = b.once(("missing", tokens.name, name), lambda: b.op("Sub", b.op("Shape", padded, start=1, end=2), tokens))
    return _with_zeros(b, x, missing, name)


def cut(b: GraphBuilder, padded: ir.Value, tokens: ir.Value, like: ir.Value) -> ir.Value:
    """Return the first ``tokens`` (int64[1]) tokens of ``padded`` [batch, more tokens, width], as ``like`` has."""
    rows = b.op("Slice", padded, b.constant([0]), tokens, b.constant([1]))
    rows.shape = ir.Shape([*dims_of(like)[:2], dims_of(padded)[2]])
    return rows


def _with_zeros(b: GraphBuilder, x: ir.Value, missing: ir.Value, name: int | str) -> ir.Value:
    ends = b.once(
        ("ends", missing.name), lambda: b.op("Concat", b.constant([0, 0, 0, 0]), missing, b.constant([0]), axis=0)
    )
    padded = b.op("Pad", x, ends)
    batch, _, inner = dims_of(x)
    padded.shape = ir.Shape([batch, name, inner])  # onnxruntime plans memory by the names of dimensions
    return padded


def _missing(b: GraphBuilder, x: ir.Value, formats: Collection[LowBitFormat]) -> ir.Value:
    """Return how many more tokens each row of ``x`` [batch, tokens, ...] needs, int64[1]: 0 or 1."""

    def append() -> ir.Value:
        rows = b.op("ReduceProd", b.op("Shape", x, start=0, end=2), keepdims=1)
        is_lone = b.op("Equal", rows, b.constant([1]))
        is_odd = b.cast(b.op("Mod", rows, b.constant([2])), "bool")
        wanted = []
        for low_bit_format in formats:
            lone_differs, odd_differs = _compare_kernels(b, low_bit_format)
            wanted += [b.op("And", is_lone, lone_differs), b.op("And", is_odd, odd_differs)]
        return b.op("Max", *(b.cast(each, "int64") for each in wanted))

    dims = dims_of(x)[:2]
    return b.once(("missing", x.name if "None" in dims else dims, tuple(formats)), append)


def _compare_kernels(b: GraphBuilder, low_bit_format: LowBitFormat) -> tuple[ir.Value, ir.Value]:
    """Return whether a lone row, and whether the last of three rows, differs from the same row in a pair; bool[1]."""
    return b.once(("kernels", low_bit_format), lambda: _append_comparison(b, low_bit_format))


def _append_comparison(b: GraphBuilder, low_bit_format: LowBitFormat) -> tuple[ir.Value, ir.Value]:
    random, inner = np.random.default_rng(0), _GROUPS * low_bit_format.group_size
    weight = []
    for dtype, shape in low_bit_format.shapes(_OUTPUTS, inner).values():
        values = random.normal(size=shape) if dtype == "float32" else random.integers(0, 256, shape)
        weight.append(b.constant(values, dtype))
    # Multiplied by one: onnxruntime would compute a matmul of constants when it loads the graph, by another kernel.
    one = b.cast(b.op("Greater", b.op("Shape", b.inputs[0], start=0, end=1), b.constant([0])), "float32")
    x = b.op("Mul", b.constant(random.normal(size=(3, inner)), "float32"), one)

    def rows(first: int, end: int) -> ir.Value:
        part = b.op("Slice", x, b.constant([first]), b.constant([end]), b.constant([0]))
        return nbits_operator(b, part, weight, low_bit_format, dtype="float32", width=_OUTPUTS)

    def differs(one: ir.Value, other: ir.Value, at: int) -> ir.Value:
        """Return whether the last row of ``one`` is another one than row ``at`` of ``other``."""
        last = b.op("Gather", one, b.constant([-1]))
        equal = b.op("Equal", last, b.op("Gather", other, b.constant([at])))
        return b.op("Equal", b.op("ReduceMin", b.cast(equal, "int64"), b.constant([1]), keepdims=0), b.constant(0))

    return differs(rows(0, 1), rows(0, 2), 0), differs(rows(0, 3), rows(1, 3), 1)

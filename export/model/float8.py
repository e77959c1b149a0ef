"""Products with weights in float8_e4m3fn, in standard operators: stored bytes and scales, dequantized in the graph.

The bytes stay where the checkpoint has them. What is multiplied is rounded as the checkpoint says: with a static scale
by QuantizeLinear, which compilers recognize; with a scale per token, which no operator has, by arithmetic.
"""

from collections.abc import Sequence

import onnx_ir as ir

from tandemrt.engines.dtypes import COMPUTE
from tandemrt.engines.errors import BadCheckpoint
from tandemrt.export.model.builder import DTYPES, GraphBuilder, dims_of, width_of
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.quantization.scheme import WHOLE, Scheme

LARGEST = 448.0  # of float8_e4m3fn
_TINY = 2.0**-100  # in place of the scale of a token of zeros


def stacked(
    b: GraphBuilder, w: Weights, modules: Sequence[str], rows: Sequence[int], inner: int, scheme: Scheme
) -> ir.Value:
    """The weights [rows_i, inner] of ``modules`` as one, in the compute dtype.

    Raises BadCheckpoint for what does not fit, and for weights that are not in float8_e4m3fn.
    """
    if scheme.weight != "float8_e4m3fn":
        raise BadCheckpoint(
            f"{modules[0]}: weights of 4 bits run on backend onnxruntime-cpu alone, for which a build packs them anew"
        )
    each = [_dequantized(b, w, module, count, inner, scheme) for module, count in zip(modules, rows, strict=True)]
    return each[0] if len(each) == 1 else b.op("Concat", *each, axis=0)


def rounded_input(b: GraphBuilder, x: ir.Value, w: Weights, module: str, scheme: Scheme) -> ir.Value:
    """``x`` [..., inner] as the product of ``module`` sees it. No row of it depends on another."""
    if scheme.inputs == "static":
        name = f"{module}.{scheme.input_scale}"
        scale = b.cast(w.as_it_lies(name, COMPUTE, (), (1,), (1, 1), numbers=True), w.dtype)
        rounded = b.op("QuantizeLinear", x, scale, output_dtype=int(DTYPES["float8_e4m3fn"]))
        return b.op("DequantizeLinear", rounded, scale)
    if scheme.inputs == "token":
        return b.cast(_by_token(b, b.cast(x, "float32"), module, scheme.input_block), w.dtype)
    return x


def _dequantized(b: GraphBuilder, w: Weights, module: str, rows: int, inner: int, scheme: Scheme) -> ir.Value:
    weight = w.as_it_lies(f"{module}.weight", ("float8_e4m3fn",), (rows, inner))
    name, counts = f"{module}.{scheme.scale}", scheme.scales(rows, inner)
    if scheme.block == (WHOLE, WHOLE):
        scale = b.cast(w.as_it_lies(name, COMPUTE, (), (1,), (1, 1), numbers=True), "float32")
        return b.cast(b.op("DequantizeLinear", weight, scale), w.dtype)
    if scheme.block == (1, WHOLE):
        scale = b.cast(w.as_it_lies(name, COMPUTE, (rows,), (rows, 1), numbers=True), "float32")
        return b.cast(b.op("DequantizeLinear", weight, scale, axis=0), w.dtype)
    scale = b.cast(w.as_it_lies(name, COMPUTE, counts, numbers=True), "float32")
    tall, wide = scheme.block
    each = b.op("Expand", b.op("Unsqueeze", scale, b.constant([1])), b.constant([counts[0], tall, counts[1]]))
    per_row = b.op("Reshape", each, b.constant([counts[0] * tall, counts[1]]))
    per_row = b.op("Slice", per_row, b.constant([0]), b.constant([rows]), b.constant([0]))
    return b.cast(b.op("DequantizeLinear", weight, per_row, axis=1, block_size=wide), w.dtype)


def _by_token(b: GraphBuilder, x: ir.Value, module: str, block: int) -> ir.Value:
    inner = width_of(x)
    if block == WHOLE:
        return _by_last_dimension(b, x)
    if inner % block:
        raise BadCheckpoint(
            f"{module}: its inputs are quantized {block} values at a time, so their number should be a multiple of "
            f"that; it is {inner}"
        )
    kept = [0] * (len(dims_of(x)) - 1)
    blocks = b.op("Reshape", x, b.constant([*kept, inner // block, block]))
    return b.op("Reshape", _by_last_dimension(b, blocks), b.constant([*kept, inner]))


def _by_last_dimension(b: GraphBuilder, x: ir.Value) -> ir.Value:
    largest = b.op("ReduceMax", b.op("Abs", x), b.constant([-1]), keepdims=1)
    scale = b.op("Max", b.op("Div", largest, b.constant(LARGEST, "float32")), b.constant(_TINY, "float32"))
    return b.op("Mul", b.cast(b.cast(b.op("Div", x, scale), "float8_e4m3fn"), "float32"), scale)

"""Matmuls with float8_e4m3fn weights in standard operators: the graph dequantizes the stored bytes.

The bytes stay in the checkpoint's files. Inputs with a static scale are quantized by QuantizeLinear, which compilers
recognize; inputs with a scale per token by arithmetic, because ONNX has no operator for it.
"""

from collections.abc import Sequence

import onnx_ir as ir

from tandemrt.engines.contract.dtypes import COMPUTE
from tandemrt.engines.recipe.backends import CPU
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.builder import DTYPES, GraphBuilder, dims_of, width_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.read.quantization.scheme import FULL_DIM, Scheme

FLOAT8_MAX = 448.0  # the largest float8_e4m3fn
_TINY = 2.0**-100  # scale of a token whose values are all zero


def stacked(
    b: GraphBuilder, w: Weights, modules: Sequence[str], rows: Sequence[int], inner: int, scheme: Scheme
) -> ir.Value:
    """Return the weights [rows_i, inner] of ``modules`` as one, in the compute dtype.

    Raises BadCheckpoint for a misshapen tensor and for weights that are not float8_e4m3fn.
    """
    if scheme.weight != "float8_e4m3fn":
        raise BadCheckpoint(f"{modules[0]}: 4-bit weights run on backend {CPU} only, for which the build repacks them")
    each = [_dequantized(b, w, module, count, inner, scheme) for module, count in zip(modules, rows, strict=True)]
    return each[0] if len(each) == 1 else b.op("Concat", *each, axis=0)


def rounded_input(b: GraphBuilder, x: ir.Value, w: Weights, module: str, scheme: Scheme) -> ir.Value:
    """Return ``x`` [..., inner] as quantized and dequantized for the matmul of ``module``; rows are independent."""
    if scheme.inputs == "static":
        name = f"{module}.{scheme.input_scale}"
        scale = b.cast(w.unconverted(name, COMPUTE, (), (1,), (1, 1), require_positive=True), w.dtype)
        rounded = b.op("QuantizeLinear", x, scale, output_dtype=int(DTYPES["float8_e4m3fn"]))
        return b.op("DequantizeLinear", rounded, scale)
    if scheme.inputs == "token":
        return b.cast(_by_token(b, b.cast(x, "float32"), module, scheme.input_group), w.dtype)
    return x


def _dequantized(b: GraphBuilder, w: Weights, module: str, rows: int, inner: int, scheme: Scheme) -> ir.Value:
    weight = w.unconverted(f"{module}.weight", ("float8_e4m3fn",), (rows, inner))
    name, counts = f"{module}.{scheme.scale}", scheme.scales(rows, inner)
    if scheme.group_shape == (FULL_DIM, FULL_DIM):
        scale = b.cast(w.unconverted(name, COMPUTE, (), (1,), (1, 1), require_positive=True), "float32")
        return b.cast(b.op("DequantizeLinear", weight, scale), w.dtype)
    if scheme.group_shape == (1, FULL_DIM):
        scale = b.cast(w.unconverted(name, COMPUTE, (rows,), (rows, 1), require_positive=True), "float32")
        return b.cast(b.op("DequantizeLinear", weight, scale, axis=0), w.dtype)
    scale = b.cast(w.unconverted(name, COMPUTE, counts, require_positive=True), "float32")
    tall, wide = scheme.group_shape
    each = b.op("Expand", b.op("Unsqueeze", scale, b.constant([1])), b.constant([counts[0], tall, counts[1]]))
    per_row = b.op("Reshape", each, b.constant([counts[0] * tall, counts[1]]))
    per_row = b.op("Slice", per_row, b.constant([0]), b.constant([rows]), b.constant([0]))
    return b.cast(b.op("DequantizeLinear", weight, per_row, axis=1, block_size=wide), w.dtype)


def _by_token(b: GraphBuilder, x: ir.Value, module: str, block: int) -> ir.Value:
    inner = width_of(x)
    if block == FULL_DIM:
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
    scale = b.op("Max", b.op("Div", largest, b.constant(FLOAT8_MAX, "float32")), b.constant(_TINY, "float32"))
    return b.op("Mul", b.cast(b.cast(b.op("Div", x, scale), "float8_e4m3fn"), "float32"), scale)

"""Products with weights in float8_e4m3fn by operators of the project: ``quantize_tokens`` and ``scaled_product``.

Inputs get a scale per token, or the static one that the checkpoint stores, and outputs one each: a scale of the whole
weight is that of all of its outputs.
"""

from collections.abc import Sequence

import onnx_ir as ir

from tandemrt.engines.dtypes import COMPUTE
from tandemrt.engines.errors import BadCheckpoint
from tandemrt.export.model.builder import GraphBuilder, dims_of, width_of
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.quantization.scheme import WHOLE, Quantization, Scheme
from tandemrt.plugins.functions import float8
from tandemrt.plugins.operators import DOMAIN

STEP = 16  # what inputs and outputs of a product must be a multiple of


def by_scales(
    b: GraphBuilder, x: ir.Value, w: Weights, modules: Sequence[str], rows: Sequence[int], scheme: Scheme
) -> ir.Value:
    """``x`` [..., inner] by the weights [rows_i, inner] of ``modules``, one behind the other: [..., sum of rows].

    Raises BadCheckpoint for what does not fit.
    """
    inner, lead = width_of(x), dims_of(x)[:-1]
    for module, count in zip(modules, rows, strict=True):
        if inner % STEP or count % STEP:
            rule = f"products in float8 on a GPU need inputs and outputs in multiples of {STEP}"
            raise BadCheckpoint(f"{module}: {rule}; it has {inner} and {count}")
    given = [] if scheme.inputs == "token" else [_one(b, w, f"{modules[0]}.{scheme.input_scale}")]
    quantized, scales = b.custom(
        "quantize_tokens",
        *(x, *given),
        domain=DOMAIN,
        outputs=[("float8_e4m3fn", (*lead, inner)), ("float32", (*lead, 1))],
    )
    weight = w.float8_bytes([f"{module}.weight" for module in modules], rows, inner)
    each = [_weight_scales(b, w, module, count, scheme) for module, count in zip(modules, rows, strict=True)]
    weight_scales = each[0] if len(each) == 1 else b.op("Concat", *each, axis=0)
    (product,) = b.custom(
        *("scaled_product", quantized, scales, weight, weight_scales),
        domain=DOMAIN,
        outputs=[(w.dtype, (*lead, sum(rows)))],
    )
    return product


def unsupported(quantization: Quantization) -> str | None:
    """What of a checkpoint's quantization the operators do not do; None: nothing. Blocks become channels first."""
    schemes = [scheme for _, scheme in quantization.rules]
    if any(scheme.weight == "mxfp4" for scheme in schemes):
        return "weights in MXFP4"
    if quantization.comes_packed:
        return "weights in float8 beside others of 4 bits" if quantization.has_float8 else None
    if any(scheme.inputs == "whole" for scheme in schemes):
        return "weights in float8 beside inputs that are whole"
    if quantization.comes_in_blocks and any(scheme.inputs != "token" for scheme in schemes):
        return "scales of blocks beside static scales of inputs"
    if len({scheme.inputs for scheme in schemes}) > 1:
        return "static scales of inputs beside scales per token"
    return None


def scaled_functions(w: Weights) -> tuple[ir.Function, ...]:
    """The bodies of the operators that products of such weights are made of."""
    if w.quantization is None or not w.quantization.has_float8 or not w.scaled_products:
        return ()
    static = any(scheme.inputs == "static" for _, scheme in w.quantization.rules)
    return float8.quantize_tokens(static=static), float8.scaled_product(w.dtype)


def _weight_scales(b: GraphBuilder, w: Weights, module: str, rows: int, scheme: Scheme) -> ir.Value:
    """A scale per output, float32 [rows]."""
    name = f"{module}.{scheme.scale}"
    if scheme.block == (WHOLE, WHOLE):
        return b.op("Expand", _one(b, w, name), b.constant([rows]))
    return b.cast(w.as_it_lies(name, COMPUTE, (rows,), (rows, 1), numbers=True), "float32")


def _one(b: GraphBuilder, w: Weights, name: str) -> ir.Value:
    """The scale of a whole tensor, float32 [1]."""
    return b.cast(w.as_it_lies(name, COMPUTE, (1,), (), (1, 1), numbers=True), "float32")

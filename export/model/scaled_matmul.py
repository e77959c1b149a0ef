"""Matmuls with float8_e4m3fn weights by the project's operators ``quantize_tokens`` and ``scaled_matmul``.

Inputs have a scale per token, or the static scale that the checkpoint stores. Weights have a scale per output; a
per-tensor scale is repeated for each output.
"""

from collections.abc import Sequence

import onnx_ir as ir

from tandemrt.engines.contract.dtypes import COMPUTE
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.builder import GraphBuilder, dims_of, width_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.read.quantization.scheme import FULL_DIM, Quantization, Scheme
from tandemrt.plugins.functions import float8
from tandemrt.plugins.operators.constants import DOMAIN

STEP = 16  # inputs and outputs of a matmul must be multiples of this


def scaled_matmul(
    b: GraphBuilder, x: ir.Value, w: Weights, modules: Sequence[str], rows: Sequence[int], scheme: Scheme
) -> ir.Value:
    """Return ``x`` [..., inner] times the adjacent weights [rows_i, inner] of ``modules``: [..., sum of rows].

    Raises BadCheckpoint for a size that the kernels do not support and for a misshapen tensor.
    """
    inner, lead = width_of(x), dims_of(x)[:-1]
    for module, count in zip(modules, rows, strict=True):
        if inner % STEP or count % STEP:
            rule = f"matmuls in float8 on a GPU need inputs and outputs in multiples of {STEP}"
            raise BadCheckpoint(f"{module}: {rule}; it has {inner} and {count}")
    static_scale = [] if scheme.inputs == "token" else [_one(b, w, f"{modules[0]}.{scheme.input_scale}")]
    quantized, scales = b.custom(
        "quantize_tokens",
        x,
        *static_scale,
        domain=DOMAIN,
        outputs=[("float8_e4m3fn", (*lead, inner)), ("float32", (*lead, 1))],
    )
    weight = w.float8_bytes([f"{module}.weight" for module in modules], rows, inner)
    each = [_weight_scales(b, w, module, count, scheme) for module, count in zip(modules, rows, strict=True)]
    weight_scales = each[0] if len(each) == 1 else b.op("Concat", *each, axis=0)
    (matmul,) = b.custom(
        "scaled_matmul",
        quantized,
        scales,
        weight,
        weight_scales,
        domain=DOMAIN,
        outputs=[(w.dtype, (*lead, sum(rows)))],
    )
    return matmul


def unsupported(quantization: Quantization) -> str | None:
    """Return the part of a quantization that the operators do not support; None: they support it.

    The build has already converted group scales to a scale per output.
    """
    schemes = [scheme for _, scheme in quantization.rules]
    if why := quantization.without_matmuls:
        return f"weights in {why}"
    if any(scheme.weight == "int8" and not scheme.symmetric for scheme in schemes):
        return "8-bit integers with zero points"
    schemes = [scheme for scheme in schemes if scheme.weight == "float8_e4m3fn"]
    if quantization.has_group_scales and quantization.is_packed:
        return "block scales of float8 weights together with weights of 4 or 8 bits"
    if any(scheme.inputs == "unquantized" for scheme in schemes):
        return "float8 weights with unquantized inputs"
    if quantization.has_group_scales and any(scheme.inputs != "token" for scheme in schemes):
        return "block scales of weights with static scales of inputs"
    if len({scheme.inputs for scheme in schemes}) > 1:
        return "static scales of inputs together with scales per token"
    return None


def scaled_matmul_functions(w: Weights) -> tuple[ir.Function, ...]:
    """Return the function bodies of the operators that these matmuls use."""
    if w.quantization is None or not w.quantization.has_float8 or not w.scaled_matmuls:
        return ()
    static = any(scheme.inputs == "static" for _, scheme in w.quantization.rules)
    return float8.quantize_tokens(static=static), float8.scaled_matmul(w.dtype)


def _weight_scales(b: GraphBuilder, w: Weights, module: str, rows: int, scheme: Scheme) -> ir.Value:
    """Return the scale per output, float32 [rows]."""
    name = f"{module}.{scheme.scale}"
    if scheme.group_shape == (FULL_DIM, FULL_DIM):
        return b.op("Expand", _one(b, w, name), b.constant([rows]))
    return b.cast(w.unconverted(name, COMPUTE, (rows,), (rows, 1), require_positive=True), "float32")


def _one(b: GraphBuilder, w: Weights, name: str) -> ir.Value:
    """Return the scale of a tensor, float32 [1]."""
    return b.cast(w.unconverted(name, COMPUTE, (1,), (), (1, 1), require_positive=True), "float32")

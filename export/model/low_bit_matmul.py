"""Matmuls with weights of 4 or 8 bits on a GPU, by the project's operators."""

from collections.abc import Callable, Sequence
from functools import partial

import onnx_ir as ir

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.builder import GraphBuilder, dims_of, width_of
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.graph.weights import Weights
from tandemrt.plugins.functions.float4 import float4_matmul
from tandemrt.plugins.functions.int4 import int4_matmul
from tandemrt.plugins.functions.int8 import int8_matmul
from tandemrt.plugins.functions.k_quants import k_quants_matmul
from tandemrt.plugins.functions.low_bit_experts import low_bit_experts
from tandemrt.plugins.operators.constants import DOMAIN, LOW_BIT_OUTPUTS
from tandemrt.plugins.operators.k_quants_layout import K_QUANTS

INPUTS = 32  # the inputs of a matmul must be a multiple of this
OVERLOADS = {False: "", True: "zeros"}  # by whether there are zero points, which some matmuls of a model may have

_ZEROS = ("gate_up_zeros", "down_zeros")


def low_bit_matmul(
    b: GraphBuilder,
    x: ir.Value,
    weight: tuple[ir.Value, ...],
    low_bit_format: LowBitFormat,
    modules: Sequence[str],
    widths: Sequence[int],
    *,
    dtype: str,
) -> ir.Value:
    """Return ``x`` [..., inner] times the adjacent weights [widths_i, inner] of ``modules``: [..., sum of widths].

    ``weight`` is the result of Weights.low_bit_tensors for weights in tiles.
    Raises BadCheckpoint for sizes that the kernels do not support.
    """
    inner, form = width_of(x), low_bit_format
    for module, width in zip(modules, widths, strict=True):
        if inner % INPUTS or width % LOW_BIT_OUTPUTS:
            raise BadCheckpoint(
                f"{module}: matmuls in {form.bits} bits on a GPU need inputs in multiples of {INPUTS} and outputs of "
                f"{LOW_BIT_OUTPUTS}; it has {inner} and {width}; build it with another dtype"
            )
    outputs = [(dtype, (*dims_of(x)[:-1], sum(widths)))]
    groups = {} if form.numbers in K_QUANTS else {"group_size": form.group_size}
    (matmul,) = b.custom(f"{form.numbers}_matmul", x, *weight, domain=DOMAIN, outputs=outputs, **groups)
    b.nodes[-1].overload = OVERLOADS[form.zeros]
    return matmul


def low_bit_functions(w: Weights, of_experts: Sequence[str]) -> tuple[ir.Function, ...]:
    """Return the function bodies of the operators that the matmuls and experts of the checkpoint use.

    ``of_experts``: the optional inputs that the operators of experts have, besides zero points.
    """
    bodies: dict[str, Callable[[], ir.Function]] = {"int8": int8_matmul, "float4": float4_matmul}
    bodies |= {kind: partial(k_quants_matmul, kind) for kind in K_QUANTS}
    matmuls = {(form.numbers, form.zeros) for form in w.low_bit_formats(experts=False) if form.tiles}
    experts = {(form.numbers, form.zeros) for form in w.low_bit_formats(experts=True) if form.tiles}
    return (
        *(
            int4_matmul(zeros=zeros, overload=OVERLOADS[zeros]) if numbers == "int4" else bodies[numbers]()
            for numbers, zeros in sorted(matmuls)
        ),
        *(
            low_bit_experts(numbers, (*of_experts, *(_ZEROS if zeros else ())), OVERLOADS[zeros])
            for numbers, zeros in sorted(experts)
        ),
    )

"""Matmuls with 4-bit weights on a GPU, by the project's operator ``int4_matmul``."""

from collections.abc import Sequence

import onnx_ir as ir

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.builder import GraphBuilder, dims_of, width_of
from tandemrt.export.graph.low_bit_format import packed_tensor_name
from tandemrt.export.graph.weights import Weights
from tandemrt.plugins.functions.int4 import int4_matmul
from tandemrt.plugins.operators.constants import DOMAIN

INPUTS, OUTPUTS = 32, 8  # the inputs and outputs of a matmul must be multiples of these
_OVERLOADS = {False: "", True: "zeros"}  # by whether there are zero points, which some matmuls of a model may have


def int4_matmul_by_tiles(
    b: GraphBuilder,
    x: ir.Value,
    weight: tuple[ir.Value, ...],
    modules: Sequence[str],
    widths: Sequence[int],
    *,
    group_size: int,
    dtype: str,
) -> ir.Value:
    """Return ``x`` [..., inner] times the adjacent weights [widths_i, inner] of ``modules``: [..., sum of widths].

    ``weight`` is the result of Weights.low_bit_tensors, with a scale per ``group_size`` inputs.
    Raises BadCheckpoint for sizes that the kernels do not support.
    """
    inner = width_of(x)
    for module, width in zip(modules, widths, strict=True):
        if inner % INPUTS or width % OUTPUTS:
            rule = f"matmuls in 4 bits on a GPU need inputs in multiples of {INPUTS} and outputs of {OUTPUTS}"
            raise BadCheckpoint(f"{module}: {rule}; it has {inner} and {width}; build it with another dtype")
    outputs = [(dtype, (*dims_of(x)[:-1], sum(widths)))]
    (matmul,) = b.custom("int4_matmul", x, *weight, domain=DOMAIN, outputs=outputs, group_size=group_size)
    b.nodes[-1].overload = _OVERLOADS[len(weight) > 2]
    return matmul


def int4_matmul_functions(w: Weights) -> tuple[ir.Function, ...]:
    """Return the function bodies of the operator, with and without zero points, as the checkpoint needs them."""
    names = w.checkpoint.tensors
    tiled = {name.rpartition(".")[0] for name in names if packed_tensor_name("", 4, "tiles") in name}
    found = sorted({f"{stem}.zeros" in names for stem in tiled})
    return tuple(int4_matmul(zeros=zeros, overload=_OVERLOADS[zeros]) for zeros in found)

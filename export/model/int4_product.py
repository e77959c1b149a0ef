"""Products with weights of 4 bits by an operator of the project, ``int4_product``: what a GPU multiplies by."""

from collections.abc import Sequence

import onnx_ir as ir

from tandemrt.engines.errors import BadCheckpoint
from tandemrt.export.model.builder import GraphBuilder, dims_of, width_of
from tandemrt.export.model.weights import Weights, stored_as
from tandemrt.plugins.functions.int4 import int4_product
from tandemrt.plugins.operators import DOMAIN

INPUTS, OUTPUTS = 32, 8  # what those of a product must be a multiple of
_OVERLOADS = {False: "", True: "zeros"}  # by whether there are zero points, which some products of a model may have


def by_tiles(
    b: GraphBuilder,
    x: ir.Value,
    weight: tuple[ir.Value, ...],
    modules: Sequence[str],
    widths: Sequence[int],
    *,
    block: int,
    dtype: str,
) -> ir.Value:
    """``x`` [..., inner] by the weights [widths_i, inner] of ``modules``, one behind the other: [..., sum of widths].

    ``weight`` is what Weights.blocks gives, with a scale for ``block`` inputs. Raises BadCheckpoint for sizes that the
    kernels do not take.
    """
    inner = width_of(x)
    for module, width in zip(modules, widths, strict=True):
        if inner % INPUTS or width % OUTPUTS:
            rule = f"products in 4 bits on a GPU need inputs in multiples of {INPUTS} and outputs of {OUTPUTS}"
            raise BadCheckpoint(f"{module}: {rule}; it has {inner} and {width}; build it with another dtype")
    outputs = [(dtype, (*dims_of(x)[:-1], sum(widths)))]
    (product,) = b.custom("int4_product", x, *weight, domain=DOMAIN, outputs=outputs, block=block)
    b.nodes[-1].overload = _OVERLOADS[len(weight) > 2]
    return product


def int4_functions(w: Weights) -> tuple[ir.Function, ...]:
    """The bodies of the operator, with zero points and without, as weights are written for it."""
    names = w.checkpoint.tensors
    tiled = {name.rpartition(".")[0] for name in names if stored_as("", 4, "tiles") in name}
    found = sorted({f"{stem}.zeros" in names for stem in tiled})
    return tuple(int4_product(zeros=zeros, overload=_OVERLOADS[zeros]) for zeros in found)

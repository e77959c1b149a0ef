"""Matmuls with unquantized weights on a CPU, by the project's operator ``tiled_matmul``."""

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.plugins.functions import tiled
from tandemrt.plugins.operators.constants import DOMAIN


def tiled_matmul(b: GraphBuilder, x: ir.Value, weight: ir.Value, *, width: int) -> ir.Value:
    """Return x @ weight.T, [..., width], for ``x`` [..., inner] and ``weight`` of Weights.tiles."""
    outputs = [("float32", (*dims_of(x)[:-1], width))]
    (matmul,) = b.custom("tiled_matmul", x, weight, domain=DOMAIN, outputs=outputs, width=width)
    b.add_function("tiled_matmul", tiled.tiled_matmul)
    return matmul

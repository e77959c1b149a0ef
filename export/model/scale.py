"""Constant factors of a model."""

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder


def scaled_by(b: GraphBuilder, x: ir.Value, factor: float, dtype: str) -> ir.Value:
    """Return ``x`` times a constant; ``x`` itself if the constant is 1."""
    if factor == 1.0:
        return x
    scaled = b.op("Mul", x, b.constant(factor, dtype))
    scaled.shape = x.shape
    return scaled

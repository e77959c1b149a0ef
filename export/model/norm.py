"""The norm of a decoder."""

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder, width_of
from tandemrt.export.model.weights import Weights


def rms_norm(b: GraphBuilder, x: ir.Value, w: Weights, name: str, eps: float) -> ir.Value:
    """Root-mean-square norm over the last dimension, computed in float32 (Zhang and Sennrich, 2019)."""
    weight = w(f"{name}.weight", (width_of(x),))
    return b.op("RMSNormalization", x, weight, axis=-1, epsilon=eps, stash_type=1)

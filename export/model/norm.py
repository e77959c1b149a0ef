"""The norm of a decoder."""

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder, width_of
from tandemrt.export.model.weights import Weights
from tandemrt.export.read.spec import ModelSpec


def rms_norm(b: GraphBuilder, x: ir.Value, w: Weights, name: str, spec: ModelSpec) -> ir.Value:
    """Root-mean-square norm over the last dimension, computed in float32 (Zhang and Sennrich, 2019)."""
    return normed(b, x, norm_weight(b, w, name, width_of(x), spec), w.dtype, spec.norm_eps)


def norm_weight(b: GraphBuilder, w: Weights, name: str, width: int, spec: ModelSpec) -> ir.Value:
    """The weight of a norm, [width]: in the compute dtype, or in float32 where it is stored less one.

    Near one, half precision would keep little of what is stored.
    """
    if not spec.norm_offset:
        return w(f"{name}.weight", (width,))
    stored = b.cast(w.stored(f"{name}.weight", (width,)), "float32")
    return b.op("Add", stored, b.constant(1, "float32"))


def normed(b: GraphBuilder, x: ir.Value, weight: ir.Value, dtype: str, eps: float) -> ir.Value:
    """``x`` over the root of its mean square, times ``weight``, in ``dtype``, which ``x`` has."""
    wide = x if weight.dtype == x.dtype else b.cast(x, "float32")
    return b.cast(b.op("RMSNormalization", wide, weight, axis=-1, epsilon=eps, stash_type=1), dtype)

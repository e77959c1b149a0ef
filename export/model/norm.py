"""Norms of a decoder."""

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, width_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.read.spec import ModelSpec


def stored_norm(b: GraphBuilder, x: ir.Value, w: Weights, name: str, spec: ModelSpec) -> ir.Value:
    """Return the norm called ``name`` over the last dimension, computed in float32.

    It is a root-mean-square norm (Zhang and Sennrich, 2019), or one that subtracts the mean and may add a bias.
    """
    if spec.layer_norm:
        width = width_of(x)
        weight = norm_weight(b, w, name, width, spec) if spec.norm_weights else b.constant([1.0] * width, w.dtype)
        bias = [w(f"{name}.bias", (width,))] if spec.norm_biases else []
        x, *bias = [part if part.dtype == weight.dtype else b.cast(part, "float32") for part in (x, *bias)]
        normalized = b.op("LayerNormalization", x, weight, *bias, axis=-1, epsilon=spec.norm_eps, stash_type=1)
        return b.cast(normalized, w.dtype)
    return normed(b, x, norm_weight(b, w, name, width_of(x), spec), w.dtype, spec.norm_eps)


def norm_by_head(
    b: GraphBuilder, x: ir.Value, w: Weights, name: str, heads: int, spec: ModelSpec, *, head_axis: int
) -> ir.Value:
    """Return ``x`` of four dimensions, whose last one is a head's values, normed with the weights of each head."""
    width, rows = width_of(x), f"{name}.weight"
    if rows in w.checkpoint.tensors:
        weight = w(rows, (heads, width))
    else:
        joined = w.stacked([f"{name}.norms.{head}.weight" for head in range(heads)], [width] * heads)
        weight = b.op("Reshape", joined, b.constant([heads, width]))
    ones = b.constant([1.0] * width, w.dtype)
    normalized = b.op("LayerNormalization", x, ones, axis=-1, epsilon=spec.norm_eps, stash_type=1)
    return b.op("Mul", normalized, weight if head_axis == 2 else b.op("Unsqueeze", weight, b.constant([1])))


def norm_weight(b: GraphBuilder, w: Weights, name: str, width: int, spec: ModelSpec) -> ir.Value:
    """Return the weight of a norm, [width], in the compute dtype.

    A weight that is stored minus one (Gemma) is returned in float32, because half precision would lose most of it.
    """
    if not spec.norm_offset:
        return w(f"{name}.weight", (width,))
    stored = b.cast(w.stored(f"{name}.weight", (width,)), "float32")
    return b.op("Add", stored, b.constant(1, "float32"))


def normed(b: GraphBuilder, x: ir.Value, weight: ir.Value, dtype: str, eps: float) -> ir.Value:
    """Return ``x`` / sqrt(mean(x²) + eps) * ``weight`` in ``dtype``, the dtype of ``x``."""
    wide = x if weight.dtype == x.dtype else b.cast(x, "float32")
    return b.cast(b.op("RMSNormalization", wide, weight, axis=-1, epsilon=eps, stash_type=1), dtype)

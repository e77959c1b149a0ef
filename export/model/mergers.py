"""Mergers of a vision tower: the states of the patches of each square become one row, a token of the decoder."""

from collections.abc import Callable, Mapping

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, width_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear
from tandemrt.export.read.vision.spec import VisionSpec


def tower_norm(b: GraphBuilder, w: Weights, spec: VisionSpec, x: ir.Value, name: str) -> ir.Value:
    """Return ``x`` normed as the tower's layers are."""
    width = width_of(x)
    weight = w(f"{name}.weight", (width,))
    if spec.rms_norms:
        return b.op("RMSNormalization", x, weight, axis=-1, epsilon=spec.norm_eps)
    bias = w(f"{name}.bias", (width,))
    return b.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=spec.norm_eps)


def joined_patches(
    b: GraphBuilder, w: Weights, spec: VisionSpec, stream: ir.Value, name: str = "merger", *, norm_last: bool = False
) -> ir.Value:
    """Return an MLP of the joined patches of each square (Qwen); ``norm_last``: the norm is of the joined patches."""
    width = spec.hidden * spec.entry.merge_size**2
    norm, up, down = (f"{name}.{part}" for part in spec.names.merger)
    if not norm_last:
        stream = tower_norm(b, w, spec, stream, norm)
    joined = b.op("Reshape", stream, b.constant([-1, width]))
    if norm_last:
        joined = tower_norm(b, w, spec, joined, norm)
    wide = Linear.stored(up, width, bias=True)(b, joined, w)
    return Linear.stored(down, spec.out, bias=True)(b, b.op("Gelu", wide), w)


def _projected_means(b: GraphBuilder, w: Weights, spec: VisionSpec, stream: ir.Value) -> ir.Value:
    """Return the mean of each square, normed and projected (Gemma 3)."""
    norm, mean_norm, projection = spec.names.merger
    means = _means(b, spec, tower_norm(b, w, spec, stream, norm))
    weight = b.op("Add", w(mean_norm, (spec.hidden,)), b.constant(1.0, w.dtype))
    return b.op("MatMul", _normed(b, spec, means, weight), w(projection, (spec.hidden, spec.out)))


def _pooled(b: GraphBuilder, w: Weights, spec: VisionSpec, stream: ir.Value) -> ir.Value:
    """Return the mean of each square, scaled, standardized by stored values if it is, and projected (Gemma 4)."""
    bias, scale, projection = spec.names.merger
    pooled = b.op("Mul", _means(b, spec, stream), b.constant(spec.hidden**0.5, w.dtype))
    if spec.standardized:
        pooled = b.op("Mul", b.op("Sub", pooled, w(bias, (spec.hidden,))), w(scale, (spec.hidden,)))
    normed = _normed(b, spec, pooled, b.constant([1.0] * spec.hidden, w.dtype))
    return Linear.stored(projection, spec.out)(b, normed, w)


def _merged_by_matmul(b: GraphBuilder, w: Weights, spec: VisionSpec, stream: ir.Value) -> ir.Value:
    """Return an MLP of a matmul of the normed patches of each square, value by value (Mistral)."""
    norm, merging, up, down = spec.names.merger
    patches = spec.entry.merge_size**2
    normed = _normed(b, spec, stream, w(f"{norm}.weight", (spec.hidden,)))
    squares = b.op("Reshape", normed, b.constant([-1, patches, spec.hidden]))
    joined = b.op("Reshape", b.op("Transpose", squares, perm=[0, 2, 1]), b.constant([-1, patches * spec.hidden]))
    merged = Linear.stored(merging, spec.hidden)(b, joined, w)
    wide = Linear.stored(up, spec.out, bias=spec.merger_bias)(b, merged, w)
    return Linear.stored(down, spec.out, bias=spec.merger_bias)(b, b.op("Gelu", wide), w)


MERGERS: Mapping[str, Callable[[GraphBuilder, Weights, VisionSpec, ir.Value], ir.Value]] = {
    "joined": joined_patches,
    "mean": _projected_means,
    "pooled": _pooled,
    "matmul": _merged_by_matmul,
}


def _means(b: GraphBuilder, spec: VisionSpec, stream: ir.Value) -> ir.Value:
    squares = b.op("Reshape", stream, b.constant([-1, spec.entry.merge_size**2, spec.hidden]))
    return b.op("ReduceMean", squares, b.constant([1]), keepdims=0)


def _normed(b: GraphBuilder, spec: VisionSpec, x: ir.Value, weight: ir.Value) -> ir.Value:
    return b.op("RMSNormalization", x, weight, axis=-1, epsilon=spec.merger_eps or spec.norm_eps)

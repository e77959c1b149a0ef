"""The graph of a vision tower: patches of one image in, the states of its tokens out.

A transformer over all patches, which may turn queries and keys by row and column of a patch. Mergers make one token of
the patches of a square: one after the last layer, and one after each tap (DeepStack). Patches come square by square.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import VISION_DTYPE, Contract
from tandemrt.export.graph.builder import LIBRARY, GraphBuilder, width_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.vision import VisionSpec

CORNERS = 4  # learned positions that bilinear interpolation weighs


def vision_contract(spec: VisionSpec) -> Contract:
    """Return the bindings of the graph."""
    window = (spec.entry.window_side * spec.entry.merge_size) ** 2
    corners = CORNERS if spec.positions else 0
    return contract.vision(pixels=spec.pixels, corners=corners, window=window, width=spec.levels * spec.out)


def build_vision(spec: VisionSpec, checkpoint: Checkpoint, attends_in: str = VISION_DTYPE) -> ir.Model:
    """Build the graph; ``checkpoint`` has only the tower's tensors, under their names in it.

    ``attends_in``: dtype of queries, keys and values. For bfloat16, which has the range of float32, GPUs have a fast
    kernel.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused or misshapen.
    """
    bindings = vision_contract(spec)
    b = GraphBuilder("vision")
    w = Weights(checkpoint, b, VISION_DTYPE)
    inputs = {binding.name: b.input(binding) for binding in bindings.inputs}
    with b.scope("patches"):
        stream = _embedded(b, w, spec, inputs["pixels"])
        if spec.positions:
            stream = b.op("Add", stream, _learned_positions(b, w, spec, inputs))
        tables = None if spec.rope_theta is None else _rotation(b, spec, inputs["positions"], spec.rope_theta)
    levels: list[ir.Value] = []
    for layer in range(spec.layers):
        with b.scope(f"blocks.{layer}"):
            attention = _Attention(spec, attends_in, None if layer in spec.whole_layers else inputs)
            stream = _block(b, w, spec, stream, tables, f"{spec.names.layer}.{layer}", attention)
        if layer in spec.taps:
            with b.scope(f"taps.{layer}"):
                name = f"deepstack_merger_list.{spec.taps.index(layer)}"
                levels.append(_merged(b, w, spec, stream, name, norm_last=True))
    with b.scope("merger"):
        if spec.merger == "mean":
            first = _projected_means(b, w, spec, stream)
        else:
            first = _merged(b, w, spec, stream, "merger", norm_last=False)
        states = b.op("Concat", first, *levels, axis=-1) if levels else first
    b.output(bindings.outputs[0], states)
    w.finish()
    return b.model()


def _embedded(b: GraphBuilder, w: Weights, spec: VisionSpec, pixels: ir.Value) -> ir.Value:
    """The frames of a still image are equal, so their weights are added."""
    side, name, frames = spec.entry.patch_size, spec.names.patches, (spec.frames,) if spec.frames else ()
    weight = w(f"{name}.weight", (spec.hidden, 3, *frames, side, side))
    summed = b.op("ReduceSum", weight, b.constant([2]), keepdims=0) if frames else weight
    flat = b.op("Reshape", summed, b.constant([spec.hidden, spec.pixels]))
    embedded = b.op("MatMul", pixels, b.op("Transpose", flat, perm=[1, 0]))
    if not spec.patch_bias:
        return embedded
    return b.op("Add", embedded, w(f"{name}.bias", (spec.hidden,)))


def _learned_positions(b: GraphBuilder, w: Weights, spec: VisionSpec, inputs: dict[str, ir.Value]) -> ir.Value:
    table = w(spec.names.positions, (spec.positions, spec.hidden))
    weights = b.op("Unsqueeze", inputs["corner_weights"], b.constant([2]))
    weighted = b.op("Mul", b.op("Gather", table, inputs["corners"]), weights)
    return b.op("ReduceSum", weighted, b.constant([1]), keepdims=0)


def _rotation(b: GraphBuilder, spec: VisionSpec, positions: ir.Value, theta: float) -> tuple[ir.Value, ir.Value]:
    """Return cosine and sine [1, patches, head / 2]: the first half of them turns by row, the second by column."""
    half = spec.hidden // spec.heads // 2
    frequencies = 1.0 / theta ** (np.arange(0, half, 2, dtype=np.float32) / half)
    angles = b.op(
        "Mul",
        b.op("Unsqueeze", b.cast(positions, "float32"), b.constant([2])),
        b.constant(frequencies, "float32"),
    )
    flat = b.op("Reshape", angles, b.constant([1, -1, half]))
    return b.op("Cos", flat), b.op("Sin", flat)


def _block(
    b: GraphBuilder,
    w: Weights,
    spec: VisionSpec,
    stream: ir.Value,
    tables: tuple[ir.Value, ir.Value] | None,
    name: str,
    attention: "_Attention",
) -> ir.Value:
    names, hidden = spec.names, spec.hidden
    normed = _norm(b, w, spec, stream, f"{name}.{names.norms[0]}")
    widths = (3 * hidden // len(names.qkv),) * len(names.qkv)
    joined = Linear(tuple(f"{name}.{part}" for part in names.qkv), widths, bias=True)(b, normed, w)
    batched = b.op("Unsqueeze", joined, b.constant([0]))  # the operators want a batch
    query, key, value = b.ops("Split", batched, b.constant([hidden] * 3), outputs=3, axis=-1)
    if tables is not None:
        query, key = (b.op("RotaryEmbedding", rows, *tables, num_heads=spec.heads) for rows in (query, key))
    mixed = attention(b, query, key, value)
    stream = b.op("Add", stream, Linear.stored(f"{name}.{names.out}", hidden, bias=True)(b, mixed, w))
    normed = _norm(b, w, spec, stream, f"{name}.{names.norms[1]}")
    *ups, down = (f"{name}.{part}" for part in names.mlp)
    wide = [Linear.stored(up, spec.intermediate, bias=True)(b, normed, w) for up in ups]
    if len(wide) > 1:
        activated = b.op("Mul", b.op("Mul", wide[0], b.op("Sigmoid", wide[0])), wide[1])  # SwiGLU
    else:
        activated = b.op("Gelu", wide[0], approximate=spec.approximate)
    return b.op("Add", stream, Linear.stored(down, hidden, bias=True)(b, activated, w))


@dataclass(frozen=True)
class _Attention:
    """Attention of each patch to all patches, or within its window if there are ``windows``, inputs of the graph."""

    spec: VisionSpec
    dtype: str
    windows: Mapping[str, ir.Value] | None

    def __call__(self, b: GraphBuilder, *parts: ir.Value) -> ir.Value:
        """Return [patches, hidden]; ``parts``: queries, keys and values, [1, patches, hidden]."""
        parts = tuple(b.cast(part, self.dtype) for part in parts)
        if self.windows is None:
            mixed = b.op("Squeeze", self._mixed(b, parts, (1, "patches")), b.constant([0]))
        else:
            flat = [b.op("Squeeze", part, b.constant([0])) for part in parts]
            padded = [b.op("Gather", part, self.windows["windows"], axis=0) for part in flat]
            size = (self.spec.entry.window_side * self.spec.entry.merge_size) ** 2
            in_windows = self._mixed(b, [*padded, None, self.windows["window_mask"]], ("windows", size))
            rows = b.op("Reshape", in_windows, b.constant([-1, self.spec.hidden]))
            mixed = b.op("Gather", rows, self.windows["window_places"], axis=0)
        return b.cast(mixed, VISION_DTYPE)

    def _mixed(self, b: GraphBuilder, inputs: Sequence[ir.Value | None], dims: tuple[int | str, int | str]) -> ir.Value:
        """Append attention, [*dims, hidden]: onnxruntime computes tiles, and never a row of scores for every patch."""
        outputs = [(self.dtype, (*dims, self.spec.hidden))]
        heads = self.spec.heads
        return b.custom("MultiHeadAttention", *inputs, domain=LIBRARY, outputs=outputs, num_heads=heads)[0]


def _merged(b: GraphBuilder, w: Weights, spec: VisionSpec, stream: ir.Value, name: str, *, norm_last: bool) -> ir.Value:
    """Return one row for each square of patches; ``norm_last``: the norm is of the joined patches."""
    width = spec.hidden * spec.entry.merge_size**2
    if not norm_last:
        stream = _norm(b, w, spec, stream, f"{name}.{spec.names.merger[0]}")
    joined = b.op("Reshape", stream, b.constant([-1, width]))
    if norm_last:
        joined = _norm(b, w, spec, joined, f"{name}.{spec.names.merger[0]}")
    wide = Linear.stored(f"{name}.{spec.names.merger[1]}", width, bias=True)(b, joined, w)
    return Linear.stored(f"{name}.{spec.names.merger[2]}", spec.out, bias=True)(b, b.op("Gelu", wide), w)


def _projected_means(b: GraphBuilder, w: Weights, spec: VisionSpec, stream: ir.Value) -> ir.Value:
    """Return one row for each square of patches: their mean, normed and projected (Gemma 3)."""
    normed = _norm(b, w, spec, stream, "post_layernorm")
    squares = b.op("Reshape", normed, b.constant([-1, spec.entry.merge_size**2, spec.hidden]))
    means = b.op("ReduceMean", squares, b.constant([1]), keepdims=0)
    weight = w("multi_modal_projector.mm_soft_emb_norm.weight", (spec.hidden,))
    weight = b.op("Add", weight, b.constant(1.0, w.dtype))
    means = b.op("RMSNormalization", means, weight, axis=-1, epsilon=spec.norm_eps)
    return b.op("MatMul", means, w("multi_modal_projector.mm_input_projection_weight", (spec.hidden, spec.out)))


def _norm(b: GraphBuilder, w: Weights, spec: VisionSpec, x: ir.Value, name: str) -> ir.Value:
    width = width_of(x)
    weight = w(f"{name}.weight", (width,))
    if spec.rms_norms:
        return b.op("RMSNormalization", x, weight, axis=-1, epsilon=spec.norm_eps)
    bias = w(f"{name}.bias", (width,))
    return b.op("LayerNormalization", x, weight, bias, axis=-1, epsilon=spec.norm_eps)

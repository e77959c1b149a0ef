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
from tandemrt.export.graph.builder import LIBRARY, GraphBuilder
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.activation import activate
from tandemrt.export.model.linear import Linear
from tandemrt.export.model.mergers import MERGERS, joined_patches, tower_norm
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.vision.spec import VisionSpec

CORNERS = 4  # learned positions that bilinear interpolation weighs
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")  # of clipped matmuls


def vision_contract(spec: VisionSpec) -> Contract:
    """Return the bindings of the graph."""
    window = (spec.entry.window_side * spec.entry.merge_size) ** 2
    corners = CORNERS if spec.entry.grid_side else 0
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
        if spec.names.first_norm:
            stream = tower_norm(b, w, spec, stream, spec.names.first_norm)
        tables = None if spec.rope is None else _rotation(b, spec, inputs["positions"])
    levels: list[ir.Value] = []
    for layer in range(spec.layers):
        with b.scope(f"blocks.{layer}"):
            attention = _Attention(spec, attends_in, inputs if layer in spec.window_layers else None)
            stream = _block(b, w, spec, stream, tables, f"{spec.names.layer}.{layer}", attention)
        if layer in spec.taps:
            with b.scope(f"taps.{layer}"):
                name = f"deepstack_merger_list.{spec.taps.index(layer)}"
                levels.append(joined_patches(b, w, spec, stream, name, norm_last=True))
    with b.scope("merger"):
        first = MERGERS[spec.merger](b, w, spec, stream)
        states = b.op("Concat", first, *levels, axis=-1) if levels else first
    b.output(bindings.outputs[0], states)
    w.finish()
    return b.model()


def _embedded(b: GraphBuilder, w: Weights, spec: VisionSpec, pixels: ir.Value) -> ir.Value:
    """The frames of a still image are equal, so their weights are added."""
    side, name, frames = spec.entry.patch_size, spec.names.patches, (spec.frames,) if spec.frames else ()
    if spec.colours_last:
        stored = b.op("Reshape", w(f"{name}.weight", (spec.hidden, spec.pixels)), b.constant([spec.hidden, side**2, 3]))
        weight = b.op("Transpose", stored, perm=[0, 2, 1])
    else:
        weight = w(f"{name}.weight", (spec.hidden, 3, *frames, side, side))
    summed = b.op("ReduceSum", weight, b.constant([2]), keepdims=0) if frames else weight
    flat = b.op("Reshape", summed, b.constant([spec.hidden, spec.pixels]))
    embedded = b.op("MatMul", pixels, b.op("Transpose", flat, perm=[1, 0]))
    if not spec.patch_bias:
        return embedded
    return b.op("Add", embedded, w(f"{name}.bias", (spec.hidden,)))


def _learned_positions(b: GraphBuilder, w: Weights, spec: VisionSpec, inputs: dict[str, ir.Value]) -> ir.Value:
    """Return the learned position of each patch: interpolated on a grid, or that of its column plus that of its row."""
    if spec.entry.grid_side:
        table = w(spec.names.positions, (spec.positions, spec.hidden))
        weights = b.op("Unsqueeze", inputs["corner_weights"], b.constant([2]))
        rows = b.op("Mul", b.op("Gather", table, inputs["corners"]), weights)
    else:
        tables = w(spec.names.positions, (2, spec.positions, spec.hidden))
        by_column = b.op("Gather", inputs["positions"], b.constant([1, 0]), axis=1)
        places = b.op("Add", by_column, b.constant([0, spec.positions]))
        rows = b.op("Gather", b.op("Reshape", tables, b.constant([-1, spec.hidden])), places)
    return b.op("ReduceSum", rows, b.constant([1]), keepdims=0)


def _rotation(b: GraphBuilder, spec: VisionSpec, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return cosine and sine [1, patches, head / 2]: the first half of them turns by row, the second by column."""
    half = spec.hidden // spec.heads // 2
    exponents = np.arange(half, dtype=np.float32).reshape(-1, 2).T / half
    if spec.rope != "alternating":
        exponents[1] = exponents[0]
    angles = b.op(
        "Mul",
        b.op("Unsqueeze", b.cast(positions, "float32"), b.constant([2])),
        b.constant(1.0 / spec.rope_theta**exponents, "float32"),
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
    norms = [f"{name}.{norm}" for norm in spec.names.norms]
    normed = tower_norm(b, w, spec, stream, norms[0])
    query, key, value = (b.op("Unsqueeze", rows, b.constant([0])) for rows in _projections(b, w, spec, normed, name))
    if spec.names.head_norms:
        query, key = (
            _normed_heads(b, w, spec, rows, f"{name}.{norm}")
            for rows, norm in zip((query, key), spec.names.head_norms, strict=True)
        )
        value = _normed_heads(b, w, spec, value, None)
    if spec.rope == "parts":
        query, key = (_parts_as_halves(b, spec, rows) for rows in (query, key))
    if tables is not None:
        query, key = (b.op("RotaryEmbedding", rows, *tables, num_heads=spec.heads) for rows in (query, key))
    mixed = _matmul(b, w, spec, attention(b, query, key, value), f"{name}.{spec.names.out}", spec.hidden)
    stream = b.op("Add", stream, tower_norm(b, w, spec, mixed, norms[2]) if norms[2:] else mixed)
    normed = tower_norm(b, w, spec, stream, norms[1])
    *ups, down = (f"{name}.{part}" for part in spec.names.mlp)
    wide = [_matmul(b, w, spec, normed, up, spec.intermediate) for up in ups]
    activated = activate(b, wide[0] if len(wide) > 1 else None, wide[-1], spec.activation)
    lowered = _matmul(b, w, spec, activated, down, spec.hidden)
    return b.op("Add", stream, tower_norm(b, w, spec, lowered, norms[3]) if norms[3:] else lowered)


def _projections(b: GraphBuilder, w: Weights, spec: VisionSpec, x: ir.Value, name: str) -> tuple[ir.Value, ...]:
    """Return queries, keys and values [patches, hidden]."""
    names = tuple(f"{name}.{part}" for part in spec.names.qkv)
    if spec.clipped:
        return tuple(_matmul(b, w, spec, x, part, spec.hidden) for part in names)
    joined = Linear(names, (3 * spec.hidden // len(names),) * len(names), bias=spec.biases)(b, x, w)
    return b.ops("Split", joined, b.constant([spec.hidden] * 3), outputs=3, axis=-1)


def _matmul(b: GraphBuilder, w: Weights, spec: VisionSpec, x: ir.Value, name: str, width: int) -> ir.Value:
    matmul = Linear.stored(name, width, bias=spec.biases)
    if not spec.clipped:
        return matmul(b, x, w)
    bounds = [w(f"{name.removesuffix('.linear')}.{bound}", ()) for bound in _BOUNDS]
    return b.op("Clip", matmul(b, b.op("Clip", x, *bounds[:2]), w), *bounds[2:])


def _normed_heads(b: GraphBuilder, w: Weights, spec: VisionSpec, rows: ir.Value, norm: str | None) -> ir.Value:
    """Return ``rows`` [1, patches, hidden] normed by heads."""
    size = spec.hidden // spec.heads
    heads = b.op("Reshape", rows, b.constant([0, 0, spec.heads, size]))
    weight = b.constant([1.0] * size, w.dtype) if norm is None else w(norm, (size,))
    heads = b.op("RMSNormalization", heads, weight, axis=-1, epsilon=spec.norm_eps)
    return b.op("Reshape", heads, b.constant([0, 0, spec.hidden]))


def _parts_as_halves(b: GraphBuilder, spec: VisionSpec, rows: ir.Value) -> ir.Value:
    """Return ``rows`` [1, patches, hidden], whose heads turn in two parts, in an order that turns as a whole.

    The parts turn by column and by row. ``_rotation`` turns the first half of a head against its second, rows first.
    """
    quarters = b.op("Reshape", rows, b.constant([0, 0, spec.heads, 4, spec.hidden // spec.heads // 4]))
    ordered = b.op("Gather", quarters, b.constant([2, 0, 3, 1]), axis=3)
    return b.op("Reshape", ordered, b.constant([0, 0, spec.hidden]))


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
        settings = {"num_heads": self.spec.heads, **({"scale": 1.0} if self.spec.unscaled else {})}
        return b.custom("MultiHeadAttention", *inputs, domain=LIBRARY, outputs=outputs, **settings)[0]

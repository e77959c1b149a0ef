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
from tandemrt.export.model.mergers import MERGERS, TowerParts
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.vision.spec import VisionSpec

_FAR = 30_000.0  # of scores of patches that no patch attends to
_BOUNDS = ("input_min", "input_max", "output_min", "output_max")  # of clipped matmuls


def vision_contract(spec: VisionSpec) -> Contract:
    """Return the bindings of the graph."""
    return contract.vision(spec.entry, spec.levels * spec.out)


def build_vision(
    spec: VisionSpec, checkpoint: Checkpoint, multiplies_in: str = VISION_DTYPE, *, standard: bool = False
) -> ir.Model:
    """Build the graph; ``checkpoint`` has only the tower's tensors, under their names in it.

    ``multiplies_in``: dtype of matmuls and attention. GPUs are fast in bfloat16, which has the range of float32; sums
    of layers, norms and rotations stay in float32. ``standard``: attend by the standard operator, as TensorRT does.

    Raises BadCheckpoint, by name, for a tensor that is missing, unused or misshapen.
    """
    bindings, b, kind = vision_contract(spec), GraphBuilder("vision"), spec.kind
    weights = Weights(checkpoint, b, VISION_DTYPE)
    parts = _Layers(b, weights, spec, weights.in_dtype(multiplies_in))
    inputs = {binding.name: b.input(binding) for binding in bindings.inputs}
    with b.scope("patches"):
        stream = parts.embedded(inputs["pixels"])
        if spec.positions:
            stream = b.op("Add", stream, parts.learned_positions(inputs))
        if kind.first_norm:
            stream = parts.norm(stream, kind.first_norm)
        tables = None if kind.rope is None else parts.rotation(inputs["positions"])
        marks = _padding_marks(b, spec, inputs["padding"], multiplies_in) if "padding" in inputs else None
    levels: list[ir.Value] = []
    for layer in range(spec.layers):
        with b.scope(f"blocks.{layer}"):
            if layer in spec.window_layers:
                # onnxruntime has no kernel with a mask in bfloat16
                attention = _Attention(spec, multiplies_in if standard else VISION_DTYPE, standard, inputs)
            else:
                attention = _Attention(spec, multiplies_in, standard, marks=marks)
            stream = parts.layer(stream, tables, f"{kind.layer}.{layer}", attention)
        if layer in spec.taps:
            with b.scope(f"taps.{layer}"):
                tap = f"deepstack_merger_list.{spec.taps.index(layer)}"
                levels.append(parts.joined(stream, [f"{tap}.{part}" for part in ("norm", "linear_fc1", "linear_fc2")]))
    with b.scope("merger"):
        if kind.last_norm:
            stream = parts.norm(stream, kind.last_norm)
        first = MERGERS[kind.merger](parts, stream, kind.parts)
        states = b.op("Concat", first, *levels, axis=-1) if levels else first
    b.output(bindings.outputs[0], b.cast(states, VISION_DTYPE))
    parts.w.finish()
    return b.model()


class _Layers(TowerParts):
    """Embeds patches and appends layers."""

    def embedded(self, pixels: ir.Value) -> ir.Value:
        """The frames of a still image are equal, so their weights are added. ``pixels`` are colours from 0 to 255."""
        b, w, spec, name = self.b, self.w, self.spec, self.spec.kind.patches
        mean, std = (np.repeat(colour, spec.entry.patch_size**2) for colour in (spec.entry.mean, spec.entry.std))
        scaled = b.op("Mul", b.cast(pixels, w.dtype), b.constant(1 / 255 / std, w.dtype))
        pixels = b.op("Sub", scaled, b.constant(mean / std, w.dtype))
        side, frames = spec.entry.patch_size, (spec.frames,) if spec.frames else ()
        colours = 3 * side**2
        if spec.kind.colours_last:
            stored = b.op("Reshape", w(f"{name}.weight", (spec.hidden, colours)), b.constant([spec.hidden, side**2, 3]))
            weight = b.op("Transpose", stored, perm=[0, 2, 1])
        else:
            weight = w(f"{name}.weight", (spec.hidden, 3, *frames, side, side))
        summed = b.op("ReduceSum", weight, b.constant([2]), keepdims=0) if frames else weight
        flat = b.op("Reshape", summed, b.constant([spec.hidden, colours]))
        embedded = b.op("MatMul", pixels, b.op("Transpose", flat, perm=[1, 0]))
        return b.op("Add", embedded, w(f"{name}.bias", (spec.hidden,))) if spec.kind.patch_bias else embedded

    def learned_positions(self, inputs: Mapping[str, ir.Value]) -> ir.Value:
        """Return the position of each patch: interpolated on a grid, or that of its column plus that of its row."""
        b, spec, name = self.b, self.spec, self.spec.kind.positions
        if spec.entry.grid_side:
            table = self.w(name, (spec.positions, spec.hidden))
            weights = b.op("Unsqueeze", inputs["corner_weights"], b.constant([2]))
            rows = b.op("Mul", b.op("Gather", table, inputs["corners"]), weights)
        else:
            tables = self.w(name, (2, spec.positions, spec.hidden))
            by_column = b.op("Gather", inputs["positions"], b.constant([1, 0]), axis=1)
            places = b.op("Add", by_column, b.constant([0, spec.positions]))
            rows = b.op("Gather", b.op("Reshape", tables, b.constant([-1, spec.hidden])), places)
        return b.op("ReduceSum", rows, b.constant([1]), keepdims=0)

    def rotation(self, positions: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return cosine and sine [1, patches, head / 2]: the first half of them turns by row, the second by column."""
        b, half = self.b, self.spec.hidden // self.spec.heads // 2
        exponents = np.arange(half, dtype=np.float32).reshape(-1, 2).T / half
        if self.spec.kind.rope != "alternating":
            exponents[1] = exponents[0]
        places = b.op("Unsqueeze", b.cast(positions, "float32"), b.constant([2]))
        angles = b.op("Mul", places, b.constant(1.0 / self.spec.rope_theta**exponents, "float32"))
        flat = b.op("Reshape", angles, b.constant([1, -1, half]))
        return b.op("Cos", flat), b.op("Sin", flat)

    def layer(
        self, stream: ir.Value, tables: tuple[ir.Value, ir.Value] | None, name: str, attention: "_Attention"
    ) -> ir.Value:
        """Return ``stream`` after a layer; ``tables``: see ``rotation``."""
        b, spec, kind = self.b, self.spec, self.spec.kind
        norms = [f"{name}.{norm}" for norm in kind.norms]
        normed = self.norm(stream, norms[0])
        query, key, value = (b.op("Unsqueeze", rows, b.constant([0])) for rows in self._projections(normed, name))
        if kind.head_norms:
            query, key, value = (
                self._normed_heads(rows, norm and f"{name}.{norm}")
                for rows, norm in zip((query, key, value), (*kind.head_norms, None), strict=True)
            )
        if kind.rope == "parts":
            query, key = (self._parts_as_halves(rows) for rows in (query, key))
        if tables is not None:
            query, key = (self._rotated(rows, tables) for rows in (query, key))
        mixed = b.cast(self._matmul(attention(b, query, key, value), f"{name}.{kind.out}", spec.hidden), self.w.dtype)
        stream = b.op("Add", stream, self.norm(mixed, norms[2]) if norms[2:] else mixed)
        normed = self.norm(stream, norms[1])
        *ups, down = (f"{name}.{part}" for part in kind.mlp)
        wide = [self._matmul(normed, up, spec.intermediate) for up in ups]
        activated = activate(b, wide[0] if len(wide) > 1 else None, wide[-1], spec.activation)
        lowered = b.cast(self._matmul(activated, down, spec.hidden), self.w.dtype)
        return b.op("Add", stream, self.norm(lowered, norms[3]) if norms[3:] else lowered)

    def _rotated(self, rows: ir.Value, tables: tuple[ir.Value, ir.Value]) -> ir.Value:
        return self.b.op("RotaryEmbedding", self.b.cast(rows, self.w.dtype), *tables, num_heads=self.spec.heads)

    def _projections(self, x: ir.Value, name: str) -> tuple[ir.Value, ...]:
        """Return queries, keys and values [patches, hidden]."""
        names, hidden = tuple(f"{name}.{part}" for part in self.spec.kind.qkv), self.spec.hidden
        if self.spec.clipped:
            return tuple(self._matmul(x, part, hidden) for part in names)
        widths = (3 * hidden // len(names),) * len(names)
        joined = self.product(x, Linear(names, widths, bias=self.spec.kind.biases))
        return self.b.ops("Split", joined, self.b.constant([hidden] * 3), outputs=3, axis=-1)

    def _matmul(self, x: ir.Value, name: str, width: int) -> ir.Value:
        """Return the product in the dtype of ``factors``; onnxruntime clips no bfloat16 on a GPU."""
        b, matmul = self.b, Linear.stored(name, width, bias=self.spec.kind.biases)
        if not self.spec.clipped:
            return self.product(x, matmul)
        bounds = [self.w(f"{name.removesuffix('.linear')}.{bound}", ()) for bound in _BOUNDS]
        product = self.product(b.op("Clip", b.cast(x, self.w.dtype), *bounds[:2]), matmul)
        return b.cast(b.op("Clip", b.cast(product, self.w.dtype), *bounds[2:]), self.factors.dtype)

    def _normed_heads(self, rows: ir.Value, norm: str | None) -> ir.Value:
        """Return ``rows`` [1, patches, hidden] normed by heads."""
        b, spec, size = self.b, self.spec, self.spec.hidden // self.spec.heads
        heads = b.op("Reshape", b.cast(rows, self.w.dtype), b.constant([0, 0, spec.heads, size]))
        weight = b.constant([1.0] * size, self.w.dtype) if norm is None else self.w(norm, (size,))
        return b.op("Reshape", self.scaled(heads, weight), b.constant([0, 0, spec.hidden]))

    def _parts_as_halves(self, rows: ir.Value) -> ir.Value:
        """Return ``rows`` [1, patches, hidden], whose heads turn in two parts, in an order that turns as a whole.

        The parts turn by column and by row. ``rotation`` turns the first half of a head against its second, rows first.
        """
        b, spec = self.b, self.spec
        quarters = b.op("Reshape", rows, b.constant([0, 0, spec.heads, 4, spec.hidden // spec.heads // 4]))
        ordered = b.op("Gather", quarters, b.constant([2, 0, 3, 1]), axis=3)
        return b.op("Reshape", ordered, b.constant([0, 0, spec.hidden]))


def _padding_marks(b: GraphBuilder, spec: VisionSpec, padding: ir.Value, dtype: str) -> tuple[ir.Value, ir.Value]:
    """Return what ends the heads of queries and of keys, [1, patches, heads, 8]: kernels need multiples of 8.

    The products are 0 for patches of the image, and far below any score for padding: kernels without a mask attend to
    none of it.
    """
    rows = b.op("Unsqueeze", b.cast(padding, dtype), b.constant([0, 2, 3]))
    ones = np.zeros((1, 1, spec.heads, 8), np.float32)
    ones[..., 0] = 1
    queries = b.op("Add", b.op("Mul", rows, b.constant(0 * ones, dtype)), b.constant(ones, dtype))
    return queries, b.op("Mul", rows, b.constant(_FAR * ones, dtype))


@dataclass(frozen=True)
class _Attention:
    """Attention of each patch to all patches, or within its window if there are ``windows``, inputs of the graph.

    ``marks``: see _padding_marks.
    """

    spec: VisionSpec
    dtype: str
    standard: bool
    windows: Mapping[str, ir.Value] | None = None
    marks: tuple[ir.Value, ir.Value] | None = None

    def __call__(self, b: GraphBuilder, *parts: ir.Value) -> ir.Value:
        """Return [patches, hidden]; ``parts``: queries, keys and values, [1, patches, hidden]."""
        parts = tuple(b.cast(part, self.dtype) for part in parts)
        if self.marks is not None:
            query, key = (self._marked(b, rows, mark) for rows, mark in zip(parts[:2], self.marks, strict=True))
            parts = query, key, parts[2]
        if self.windows is None:
            mixed = b.op("Squeeze", self._mixed(b, parts, (1, "patches")), b.constant([0]))
        else:
            flat = [b.op("Squeeze", part, b.constant([0])) for part in parts]
            padded = [b.op("Gather", part, self.windows["windows"], axis=0) for part in flat]
            dims = "windows", self.spec.entry.window_patches
            in_windows = self._mixed(b, [*padded, None, self.windows["window_mask"]], dims)
            rows = b.op("Reshape", in_windows, b.constant([-1, self.spec.hidden]))
            mixed = b.op("Gather", rows, self.windows["window_places"], axis=0)
        return mixed

    def _marked(self, b: GraphBuilder, rows: ir.Value, mark: ir.Value) -> ir.Value:
        size = self.spec.hidden // self.spec.heads
        heads = b.op("Reshape", rows, b.constant([1, -1, self.spec.heads, size]))
        return b.op("Reshape", b.op("Concat", heads, mark, axis=3), b.constant([1, -1, self.spec.heads * (size + 8)]))

    def _mixed(self, b: GraphBuilder, inputs: Sequence[ir.Value | None], dims: tuple[int | str, int | str]) -> ir.Value:
        """Append attention, [*dims, hidden]: onnxruntime computes tiles, and never a row of scores for every patch."""
        outputs = [(self.dtype, (*dims, self.spec.hidden))]
        scale = 1.0 if self.spec.kind.unscaled else (self.spec.hidden // self.spec.heads) ** -0.5
        if self.standard:
            return self._by_standard(b, inputs, scale)
        settings = {"num_heads": self.spec.heads, "scale": scale}
        return b.custom("MultiHeadAttention", *inputs, domain=LIBRARY, outputs=outputs, **settings)[0]

    def _by_standard(self, b: GraphBuilder, inputs: Sequence[ir.Value | None], scale: float) -> ir.Value:
        """Append the standard operator as decoders use it (LinearCacheAttention)."""
        query, key, value, *mask = (part for part in inputs if part is not None)
        query, key, value = (
            b.op("Transpose", b.op("Reshape", part, b.constant([0, 0, self.spec.heads, -1])), perm=[0, 2, 1, 3])
            for part in (b.op("Mul", query, b.constant(scale, self.dtype)), key, value)
        )
        patches = self.spec.entry.window_patches
        rows = [b.op("Unsqueeze", b.cast(part, "bool"), b.constant([1, 2])) for part in mask]
        masks = [b.op("Expand", row, b.constant([1, 1, patches, patches])) for row in rows]
        mixed = b.op("Attention", query, key, value, *masks, is_causal=0, scale=1.0)
        return b.op("Reshape", b.op("Transpose", mixed, perm=[0, 2, 1, 3]), b.constant([0, 0, self.spec.hidden]))

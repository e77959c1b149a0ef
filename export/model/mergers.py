"""Mergers of a vision tower: the states of the patches of each square become one row, a token of the decoder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, width_of
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.linear import Linear
from tandemrt.export.read.vision.spec import VisionSpec


@dataclass(frozen=True)
class TowerParts:
    """Appends parts of the tower ``spec`` to the graph ``b``. ``w``: weights; ``factors``: of matmuls."""

    b: GraphBuilder
    w: Weights
    spec: VisionSpec
    factors: Weights

    def norm(self, x: ir.Value, name: str, eps: float | None = None) -> ir.Value:
        """Return ``x`` normed as the tower's layers are; ``eps``: another one than theirs."""
        width, eps = width_of(x), eps or self.spec.norm_eps
        weight = self.w(f"{name}.weight", (width,))
        if self.spec.kind.rms_norms:
            return self.b.op("RMSNormalization", x, weight, axis=-1, epsilon=eps)
        return self.b.op("LayerNormalization", x, weight, self.w(f"{name}.bias", (width,)), axis=-1, epsilon=eps)

    def scaled(self, x: ir.Value, weight: ir.Value) -> ir.Value:
        """Return ``x`` divided by its root mean square, times ``weight``."""
        return self.b.op("RMSNormalization", x, weight, axis=-1, epsilon=self.spec.norm_eps)

    def product(self, x: ir.Value, matmul: Linear) -> ir.Value:
        """Return ``x`` multiplied by a stored weight, in the dtype of ``factors``."""
        return matmul(self.b, self.b.cast(x, self.factors.dtype), self.factors)

    def joined(self, stream: ir.Value, names: Sequence[str]) -> ir.Value:
        """Return an MLP, or one matmul, of the joined patches of each square, which may be normed before."""
        norm, *linears = names
        width = self.spec.hidden * self.spec.entry.merge_size**2
        joined = self.b.op("Reshape", stream, self.b.constant([-1, width]))
        if norm:
            joined = self.norm(joined, norm, self.spec.merger_eps)
        return self._mlp(joined, linears, self.spec.merger_hidden or width)

    def projected_means(self, stream: ir.Value, names: Sequence[str]) -> ir.Value:
        """Return the mean of each square, normed and projected (Gemma 3)."""
        b, w, (norm, projection), hidden = self.b, self.w, names, self.spec.hidden
        weight = b.op("Add", w(norm, (hidden,)), b.constant(1.0, w.dtype))
        normed = b.cast(self.scaled(self._means(stream), weight), self.factors.dtype)
        return b.op("MatMul", normed, self.factors(projection, (hidden, self.spec.out)))

    def pooled(self, stream: ir.Value, names: Sequence[str]) -> ir.Value:
        """Return the mean of each square, scaled, standardized by stored values if it is, and projected (Gemma 4)."""
        b, w, (bias, scale, projection), hidden = self.b, self.w, names, self.spec.hidden
        pooled = b.op("Mul", self._means(stream), b.constant(hidden**0.5, w.dtype))
        if self.spec.standardized:
            pooled = b.op("Mul", b.op("Sub", pooled, w(bias, (hidden,))), w(scale, (hidden,)))
        normed = self.scaled(pooled, b.constant([1.0] * hidden, w.dtype))
        return self.product(normed, Linear.stored(projection, self.spec.out))

    def merged_by_matmul(self, stream: ir.Value, names: Sequence[str]) -> ir.Value:
        """Return an MLP of a matmul of the normed patches of each square, value by value (Mistral)."""
        b, (norm, merging, *linears), hidden = self.b, names, self.spec.hidden
        patches = self.spec.entry.merge_size**2
        squares = b.op("Reshape", self.norm(stream, norm, self.spec.merger_eps), b.constant([-1, patches, hidden]))
        joined = b.op("Reshape", b.op("Transpose", squares, perm=[0, 2, 1]), b.constant([-1, patches * hidden]))
        return self._mlp(self.product(joined, Linear.stored(merging, hidden)), linears, self.spec.out)

    def _means(self, stream: ir.Value) -> ir.Value:
        shape = self.b.constant([-1, self.spec.entry.merge_size**2, self.spec.hidden])
        return self.b.op("ReduceMean", self.b.op("Reshape", stream, shape), self.b.constant([1]), keepdims=0)

    def _mlp(self, x: ir.Value, linears: Sequence[str], hidden: int) -> ir.Value:
        for up in linears[:-1]:
            x = self.b.op("Gelu", self.product(x, Linear.stored(up, hidden, bias=self.spec.merger_bias)))
        return self.product(x, Linear.stored(linears[-1], self.spec.out, bias=self.spec.merger_bias))


MERGERS: Mapping[str, Callable[[TowerParts, ir.Value, Sequence[str]], ir.Value]] = {
    "joined": TowerParts.joined,
    "mean": TowerParts.projected_means,
    "pooled": TowerParts.pooled,
    "matmul": TowerParts.merged_by_matmul,
}

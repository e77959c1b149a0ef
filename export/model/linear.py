"""Matmuls with stored weights, unquantized or in any supported quantization format."""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, width_of
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model import dequantized
from tandemrt.export.model.low_bit_int8_matmul import low_bit_int8_matmul
from tandemrt.export.model.low_bit_matmul import low_bit_matmul
from tandemrt.export.model.matmul_nbits import matmul_nbits
from tandemrt.export.model.scaled_matmul import scaled_matmul
from tandemrt.export.model.tiled_matmul import tiled_matmul
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.plugins.operators.low_bit_interleaved import OUTPUTS


@dataclass(frozen=True)
class Linear:
    """x @ weight.T (+ bias), for one weight or several merged ones, such as gate and up.

    The weights are called ``names`` and have ``widths`` outputs. Outputs of merged weights are concatenated. ``bias``:
    whether each weight has a bias.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    bias: bool = False

    @classmethod
    def stored(cls, name: str, width: int, *, bias: bool = False) -> "Linear":
        """Return the matmul by one weight, ``name.weight`` [width, …], and its ``name.bias`` [width]."""
        return cls((name,), (width,), bias)

    @property
    def width(self) -> int:
        """The last dimension of the result."""
        return sum(self.widths)

    def __call__(self, b: GraphBuilder, x: ir.Value, w: Weights) -> ir.Value:
        """Append the matmul: the last dimension of ``x`` becomes ``width``."""
        matmul = self._matmul(b, x, w)
        if not self.bias:
            return matmul
        return b.op("Add", matmul, w.stacked([f"{name}.bias" for name in self.names], self.widths))

    def first(self, b: GraphBuilder, x: ir.Value, w: Weights, width: int) -> ir.Value:
        """Append the matmul for ``width`` outputs or more, the first ones. Kernels of a CPU compute no further ones."""
        return self(b, x, w) if self.bias else self._matmul(b, x, w, width)

    def outputs(self, b: GraphBuilder, x: ir.Value, w: Weights, *orders: Sequence[int]) -> tuple[ir.Value, ...]:
        """Return the outputs with the numbers of each of ``orders``, in that order.

        Rows of unquantized weights are put in order when an engine loads, for a matmul per order. Of other weights the
        results are, in every call.
        """
        numbers = [b.constant(list(order)) for order in orders]
        if not self._is_unquantized(w, width_of(x)):
            whole = self(b, x, w)
            return tuple(b.op("Gather", whole, each, axis=1) for each in numbers)
        weight = w.stacked([f"{name}.weight" for name in self.names], self.widths, (width_of(x),))
        biases = w.stacked([f"{name}.bias" for name in self.names], self.widths) if self.bias else None

        def matmul(order: ir.Value) -> ir.Value:
            rows = b.op("Gather", weight, order, axis=0)
            result = b.op("MatMul", x, b.op("Transpose", rows, perm=[1, 0]))
            return result if biases is None else b.op("Add", result, b.op("Gather", biases, order, axis=0))

        return tuple(map(matmul, numbers))

    def _is_unquantized(self, w: Weights, inner: int) -> bool:
        names = [f"{name}.weight" for name in self.names]
        if w.tiles(names, self.widths, inner) is not None or any(map(w.quantized, self.names)):
            return False
        return not any(map(w.transposed, names))  # asked last: packed weights have other names

    def _matmul(self, b: GraphBuilder, x: ir.Value, w: Weights, width: int | None = None) -> ir.Value:
        """Append the matmul without the bias; see ``first`` for ``width``."""
        names, inner = [f"{name}.weight" for name in self.names], width_of(x)
        if (tiles := w.tiles(names, self.widths, inner)) is not None:
            return tiled_matmul(b, x, tiles, width=width or self.width)
        stored = [w.quantized(name) for name in self.names]
        if len(parts := self._alike(stored)) > 1:
            return b.op("Concat", *(part(b, x, w) for part in parts), axis=-1)
        how = stored[0]
        if isinstance(how, LowBitFormat):
            low_bit_tensors = w.low_bit_tensors(names, self.widths, inner, how)
            if how.tiles:
                return low_bit_matmul(b, x, low_bit_tensors, how, self.names, self.widths, dtype=w.dtype)
            if how.interleaved:
                return low_bit_int8_matmul(b, x, low_bit_tensors, how, width=width or self.width)
            return matmul_nbits(b, x, low_bit_tensors, how, dtype=w.dtype, width=self.width)
        if isinstance(how, Scheme) and w.scaled_matmuls:
            return scaled_matmul(b, x, w, self.names, self.widths, how)
        if isinstance(how, Scheme):
            x = dequantized.rounded_input(b, x, w, self.names[0], how)
            weight = dequantized.stacked(b, w, self.names, self.widths, inner, how)
        elif all(map(w.transposed, names)):
            parts = [w(name, (inner, width)) for name, width in zip(names, self.widths, strict=True)]
            return b.op("MatMul", x, parts[0] if len(parts) == 1 else b.op("Concat", *parts, axis=1))
        else:
            weight = w.stacked(names, self.widths, (inner,))
        return b.op("MatMul", x, b.op("Transpose", weight, perm=[1, 0]))

    def _alike(self, stored: Sequence[LowBitFormat | Scheme | None]) -> list["Linear"]:
        """Return matmuls by neighbouring weights that are ``stored`` alike, so that one matmul can read them."""
        parts: list[Linear] = []
        for at, (name, width, how) in enumerate(zip(self.names, self.widths, stored, strict=True)):
            if at and how == stored[at - 1] and not self._is_separate(how):
                parts[-1] = merge_linears(parts[-1], Linear.stored(name, width))
            else:
                parts.append(Linear.stored(name, width))
        return parts

    def _is_separate(self, how: LowBitFormat | Scheme | None) -> bool:
        """Whether each weight needs a matmul of its own: with a static input scale, or if tiles hold two weights."""
        if isinstance(how, LowBitFormat):
            return how.interleaved and any(width % OUTPUTS for width in self.widths[:-1])
        return isinstance(how, Scheme) and how.inputs == "static"


def merge_linears(*matmuls: Linear) -> Linear:
    """Merge matmuls of the same input into one. All of them have a bias, or none has."""
    assert len({matmul.bias for matmul in matmuls}) == 1, "either all matmuls have a bias or none"
    names = tuple(name for matmul in matmuls for name in matmul.names)
    widths = tuple(width for matmul in matmuls for width in matmul.widths)
    return Linear(names, widths, matmuls[0].bias)

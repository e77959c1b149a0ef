"""Products with stored weights: whatever multiplies by a matrix of the checkpoint does it here."""

from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.export.model import float8
from tandemrt.export.model.builder import GraphBuilder, width_of
from tandemrt.export.model.int4_product import by_tiles
from tandemrt.export.model.integers import by_blocks
from tandemrt.export.model.scaled_product import by_scales
from tandemrt.export.model.weights import Weights
from tandemrt.export.quantize.blocks import Form
from tandemrt.export.read.quantization.scheme import Scheme


@dataclass(frozen=True)
class Linear:
    """x @ weight.T (+ bias) by the weights called ``names``, which give ``widths``.

    Several weights are one wide product, their results one behind the other; ``bias`` says whether each has one.
    """

    names: tuple[str, ...]
    widths: tuple[int, ...]
    bias: bool = False

    @classmethod
    def stored(cls, name: str, width: int, *, bias: bool = False) -> "Linear":
        """The product by one weight, ``name.weight`` [width, …], and its ``name.bias`` [width]."""
        return cls((name,), (width,), bias)

    @property
    def width(self) -> int:
        """The last dimension of what it gives."""
        return sum(self.widths)

    def __call__(self, b: GraphBuilder, x: ir.Value, w: Weights) -> ir.Value:
        """Append the product: the last dimension of ``x`` becomes ``width``."""
        product = self._product(b, x, w)
        if not self.bias:
            return product
        return b.op("Add", product, w.stacked([f"{name}.bias" for name in self.names], self.widths))

    def _product(self, b: GraphBuilder, x: ir.Value, w: Weights) -> ir.Value:
        names, inner = [f"{name}.weight" for name in self.names], width_of(x)
        stored = {(w.form(f"{name}.weight") or w.scheme(name)) for name in self.names}
        how = next(iter(stored))
        # A static scale of inputs is each product's own.
        if len(stored) > 1 or (len(names) > 1 and isinstance(how, Scheme) and how.inputs == "static"):
            each = [Linear((name,), (width,))(b, x, w) for name, width in zip(self.names, self.widths, strict=True)]
            return b.op("Concat", *each, axis=-1)
        if isinstance(how, Form):
            blocks = w.blocks(names, self.widths, inner, how)
            if how.tiles:
                return by_tiles(b, x, blocks, self.names, self.widths, block=how.block, dtype=w.dtype)
            return by_blocks(b, x, blocks, how, dtype=w.dtype, width=self.width)
        if isinstance(how, Scheme) and w.scaled_products:
            return by_scales(b, x, w, self.names, self.widths, how)
        if isinstance(how, Scheme):
            x = float8.rounded_input(b, x, w, self.names[0], how)
            weight = float8.stacked(b, w, self.names, self.widths, inner, how)
        elif len(names) == 1 and w.transposed(names[0]):
            return b.op("MatMul", x, w(names[0], (inner, self.width)))
        else:
            weight = w.stacked(names, self.widths, (inner,))
        return b.op("MatMul", x, b.op("Transpose", weight, perm=[1, 0]))


def packed(*products: Linear) -> Linear:
    """Products of the same input as one. All of them have a bias, or none."""
    assert len({product.bias for product in products}) == 1, "either all products have a bias or none"
    names = tuple(name for product in products for name in product.names)
    widths = tuple(width for product in products for width in product.widths)
    return Linear(names, widths, products[0].bias)

"""Products with stored weights: whatever multiplies by a matrix of the checkpoint does it here."""

from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.export.model.builder import GraphBuilder, width_of
from tandemrt.export.model.weights import Weights


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
        weight = w.stacked([f"{name}.weight" for name in self.names], self.widths, (width_of(x),))
        product = b.op("MatMul", x, b.op("Transpose", weight, perm=[1, 0]))
        if not self.bias:
            return product
        return b.op("Add", product, w.stacked([f"{name}.bias" for name in self.names], self.widths))


def packed(*products: Linear) -> Linear:
    """Products of the same input as one. All of them have a bias, or none."""
    assert len({product.bias for product in products}) == 1, "either all products have a bias or none"
    names = tuple(name for product in products for name in product.names)
    widths = tuple(width for product in products for width in product.widths)
    return Linear(names, widths, products[0].bias)

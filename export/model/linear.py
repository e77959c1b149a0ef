"""Products with stored weights: whatever multiplies by a matrix of the checkpoint does it here."""

from dataclasses import dataclass

import onnx_ir as ir

from tandemrt.export.model.builder import LIBRARY, GraphBuilder, dims_of, width_of
from tandemrt.export.model.weights import Weights
from tandemrt.export.quantize.blocks import BITS, BLOCK, blocks_in


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
        if not w.is_quantized(names[0]):
            return b.op("MatMul", x, b.op("Transpose", w.stacked(names, self.widths, (inner,)), perm=[1, 0]))
        (product,) = b.custom(
            "MatMulNBits",
            x,
            *w.quantized(names, self.widths, (blocks_in(inner), BLOCK)),
            domain=LIBRARY,
            outputs=[(w.dtype, (*dims_of(x)[:-1], self.width))],
            K=inner,
            N=self.width,
            bits=BITS,
            block_size=BLOCK,
            # Integers all the way: the one kernel of it that rounds a row the same way, whatever rows stand beside it.
            accuracy_level=4,
        )
        return product


def packed(*products: Linear) -> Linear:
    """Products of the same input as one. All of them have a bias, or none."""
    assert len({product.bias for product in products}) == 1, "either all products have a bias or none"
    names = tuple(name for product in products for name in product.names)
    widths = tuple(width for product in products for width in product.widths)
    return Linear(names, widths, products[0].bias)

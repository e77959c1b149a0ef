"""How a bundle stores low-bit weights: tensors, their names, dtypes and shapes."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tandemrt.plugins.operators.int4_interleaved import OUTPUTS, interleaved_shape
from tandemrt.plugins.operators.int4_layout import padded_inner, scales_of_output


@dataclass(frozen=True)
class LowBitFormat:
    """Storage format of a low-bit weight.

    Attributes:
        bits: bits per value.
        group_size: the number of values per scale.
        zeros: whether the weight has zero points.
        tiles: dtype of the scales in the layouts of the operators int4_matmul and int8_matmul; None: the layout of
            MatMulNBits, with float32 scales.
        interleaved: the layout of the operator int4_int8_matmul instead.
        floats: floats of 4 or 8 bits in the layouts of the operators float4_matmul and float8_experts instead; then
            also ``tiles``.
    """

    bits: int
    group_size: int
    zeros: bool = False
    tiles: str | None = None
    interleaved: bool = False
    floats: bool = False

    @property
    def numbers(self) -> str:
        """The name of the values' type."""
        return f"{'float' if self.floats else 'int'}{self.bits}"

    @property
    def scales(self) -> str:
        """The dtype of the scales."""
        if self.floats:
            return "uint8" if self.bits == 4 else "float32"
        return self.tiles or "float32"

    def shapes(self, rows: int, inner: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of the integers, scales and zero points of a matrix [rows, inner]."""
        shapes: dict[str, tuple[str, tuple[int, ...]]]
        if self.interleaved:
            shape = interleaved_shape(rows, inner)
            by_tile = shape[0], -(-inner // self.group_size) * OUTPUTS
            shapes = {f"interleaved{self.group_size}": ("uint8", shape), "scales": ("float32", by_tile)}
            return shapes | ({"zeros": ("uint8", by_tile)} if self.zeros else {})
        # The last may be padded.
        aligned = self.tiles and self.numbers != "float8"
        count = scales_of_output(inner, self.group_size) if aligned else -(-inner // self.group_size)
        shapes = (
            {f"tiles{self.group_size}": ("uint8", (rows, padded_inner(inner) * self.bits // 8))}
            if self.tiles
            else {"integers": ("uint8", (rows, count, self.group_size * self.bits // 8))}
        )
        shapes["scales"] = (self.scales, (rows, count))
        if self.floats:
            return shapes | ({"factors": ("float32", (rows,))} if self.bits == 4 else {})
        return shapes | ({"zeros": ("uint8", (rows, -(-count * self.bits // 8)))} if self.zeros else {})


def numpy_dtype(dtype: str) -> np.dtype:
    """Return numpy's dtype for a dtype name of the project."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def packed_tensor_name(name: str, numbers: str, kind: str) -> str:
    """Return the name of the tensor of ``kind`` (LowBitFormat.shapes) of the weight ``name`` of ``numbers``."""
    return f"{name}.{numbers}.{kind}"

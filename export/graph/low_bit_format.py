"""How a bundle stores low-bit weights: tensors, their names, dtypes and shapes."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tandemrt.plugins.operators.int4_layout import padded_inner, scales_of_output
from tandemrt.plugins.operators.k_quants_layout import BLOCK, K_QUANTS
from tandemrt.plugins.operators.low_bit_interleaved import OUTPUTS, interleaved_shape


@dataclass(frozen=True)
class LowBitFormat:
    """Storage format of a low-bit weight.

    Attributes:
        bits: bits per value.
        group_size: the number of values per scale.
        zeros: whether the weight has zero points.
        tiles: dtype of the scales in the layouts of the operators int4_matmul and int8_matmul; None: the layout of
            MatMulNBits, with float32 scales.
        interleaved: the layout of the operator low_bit_int8_matmul instead.
        offsets: whether groups have offsets, which are added to the products of integers and scales.
        groups_per_scale: with several, scales and offsets have two levels: a float32 one for so many groups, and for
            each group an int8 one that multiplies it. Then ``tiles`` are the layout of a type K (K_QUANTS).
        table: the name of the table (TABLES) whose integers of 8 bits the values choose among; "": there is none.
        floats: floats of 4 or 8 bits in the layouts of the operators float4_matmul and float8_experts instead; then
            also ``tiles``.
    """

    bits: int
    group_size: int
    zeros: bool = False
    tiles: str | None = None
    interleaved: bool = False
    floats: bool = False
    offsets: bool = False
    groups_per_scale: int = 1
    table: str = ""

    @property
    def numbers(self) -> str:
        """The name of the values' type."""
        if self.table:
            return self.table
        if self.tiles and self.groups_per_scale > 1:
            return "q4_k" if self.offsets else "q6_k"
        return f"{'float' if self.floats else 'int'}{self.bits}"

    @property
    def middle(self) -> float:
        """The zero point of a weight without zero points and offsets."""
        return float(1 << (7 if self.table else self.bits - 1))

    @property
    def scales(self) -> str:
        """The dtype of the scales."""
        if self.numbers in K_QUANTS:
            return "float16"
        if self.floats:
            return "uint8" if self.bits == 4 else "float32"
        return self.tiles or "float32"

    def shapes(self, rows: int, inner: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return dtype and shape of the integers, scales and zero points of a matrix [rows, inner]."""
        shapes: dict[str, tuple[str, tuple[int, ...]]]
        if self.interleaved:
            return self._interleaved_shapes(rows, inner)
        if (quant := K_QUANTS.get(self.numbers)) is not None:
            return {
                f"tiles{self.group_size}": ("uint8", (rows, inner * quant.bits // 8)),
                "scales": ("int8", (rows, quant.scales_of_output(inner))),
                "factors": ("float16", (rows, quant.factors_of_output(inner))),
            }
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

    def _interleaved_shapes(self, rows: int, inner: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        tiles, nbytes = interleaved_shape(rows, inner, self.bits)
        groups = -(-inner // self.group_size)
        by_scale = tiles, -(-groups // self.groups_per_scale) * OUTPUTS
        by_group, two_levels = (tiles, groups * OUTPUTS), self.groups_per_scale > 1
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            f"interleaved{self.group_size}": ("uint8", (tiles, nbytes)),
            "scales": ("float32", by_scale),
        }
        optional = {
            "zeros": ("uint8", by_group, self.zeros),
            "offsets": ("float32", by_scale, self.offsets),
            "subscales": ("int8", by_group, two_levels),
            "suboffsets": ("int8", by_group, two_levels and self.offsets),
        }
        return shapes | {kind: (dtype, shape) for kind, (dtype, shape, used) in optional.items() if used}


def k_quant_format(kind: str, dtype: str) -> LowBitFormat:
    """Return the form of a weight of a type K on a GPU that computes in ``dtype``."""
    quant = K_QUANTS[kind]
    return LowBitFormat(
        quant.bits, quant.group, tiles=dtype, offsets=quant.minima, groups_per_scale=BLOCK // quant.group
    )


def numpy_dtype(dtype: str) -> np.dtype:
    """Return numpy's dtype for a dtype name of the project."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def packed_tensor_name(name: str, numbers: str, kind: str) -> str:
    """Return the name of the tensor of ``kind`` (LowBitFormat.shapes) of the weight ``name`` of ``numbers``."""
    return f"{name}.{numbers}.{kind}"

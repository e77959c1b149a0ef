"""Quantize a matrix to integers of 8 or 4 bits with one scale per group: the format of onnxruntime's MatMulNBits.

A group is a run of consecutive values of one row. A value is (integer - zero point) * scale; without zero points the
middle of the range is zero. A byte holds two integers of 4 bits, the first one in its low half. Matmuls on a GPU read
the integers in another order (plugins/reference/int4.py and int8.py).
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tandemrt.export.graph.low_bit_format import LowBitFormat, numpy_dtype
from tandemrt.plugins.operators.int4_layout import CHUNK, in_tiles, padded_inner, scales_of_output
from tandemrt.plugins.operators.int8_layout import bytes_in_tiles
from tandemrt.plugins.operators.k_quants_layout import K_QUANTS, KQuant
from tandemrt.plugins.operators.low_bit_interleaved import by_tile, interleaved
from tandemrt.plugins.operators.tables4 import TABLES

GROUP_SIZE = 32  # values per scale: as fast as larger groups (docs/benchmarks.md), and the most exact
_AT_ONCE = 1 << 22  # values quantized in one step, to bound the memory use
_SHRUNK = np.linspace(1.0, 0.7, 13, dtype=np.float32)  # fractions of a group's range that 4 bits try


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized matrix [rows, ``inner``].

    ``integers``: uint8 [rows, groups, group size], one integer per byte. ``scales``: float32 [rows, groups].
    ``zeros``: zero points, uint8 [rows, groups]; None places all of them in the middle of the range. ``offsets``:
    float32 as ``scales``; a value is then integer * scale + offset. ``subscales``, ``suboffsets``: int8 [rows, groups];
    scales and offsets are then [rows, groups / groups_per_scale], and those of a group are products.
    """

    form: LowBitFormat
    inner: int
    integers: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.uint8] | None = None
    offsets: npt.NDArray[np.float32] | None = None
    subscales: npt.NDArray[np.int8] | None = None
    suboffsets: npt.NDArray[np.int8] | None = None

    @cached_property
    def dequantized(self) -> npt.NDArray[np.float32]:
        """The dequantized matrix, float32 [rows, inner]."""
        stored = TABLES[self.form.table][self.integers] if self.form.table else self.integers
        scales, integers = self._each_group(self.scales, self.subscales), stored.astype(np.float32)
        if self.offsets is not None:
            values = integers * scales + self._each_group(self.offsets, self.suboffsets)
        else:
            zeros = np.float32(self.form.middle) if self.zeros is None else self.zeros[:, :, None]
            values = (integers - zeros) * scales
        matrix: npt.NDArray[np.float32] = values.reshape(len(values), -1)[:, : self.inner]
        return matrix

    def _each_group(
        self, values: npt.NDArray[np.float32], factors: npt.NDArray[np.int8] | None
    ) -> npt.NDArray[np.float32]:
        """Return the value of each group, float32 [rows, groups, 1]."""
        if factors is not None:
            values = values.repeat(self.form.groups_per_scale, axis=1) * factors
        return values[:, :, None]

    def in_form(self, form: LowBitFormat) -> "QuantizedMatrix":
        """Return the matrix with equal values in a ``form`` with more bits, smaller groups or another layout."""
        integers, subscales = self.integers, self.subscales
        if self.form.table and not form.table:
            integers = TABLES[self.form.table][integers]
        elif form.bits > self.form.bits and self.offsets is None:
            integers = integers + np.uint8(form.middle - self.form.middle)
        if subscales is not None and (split := self.form.group_size // form.group_size) > 1:
            integers, subscales = integers.reshape(len(integers), -1, form.group_size), subscales.repeat(split, axis=1)
        return replace(self, form=form, integers=integers, subscales=subscales)

    def stored(self) -> dict[str, npt.NDArray]:
        """Return the arrays to write, keyed as in ``LowBitFormat.shapes``."""
        if (quant := K_QUANTS.get(self.form.numbers)) is not None:
            return self._k_quant(quant)
        if self.form.tiles:
            return self._tiles()
        if self.form.interleaved:
            return self._interleaved()
        packed = nibbles if self.form.bits == 4 else np.asarray
        arrays: dict[str, npt.NDArray] = {"integers": packed(self.integers), "scales": self.scales}
        return arrays if self.zeros is None else arrays | {"zeros": packed(self.zeros)}

    def _interleaved(self) -> dict[str, npt.NDArray]:
        integers = self.integers.reshape(len(self.integers), -1)[:, : self.inner]
        kinds = ("scales", "zeros", "offsets", "subscales", "suboffsets")
        by_tiles = {kind: by_tile(array) for kind in kinds if (array := getattr(self, kind)) is not None}
        return {f"interleaved{self.form.group_size}": interleaved(integers, self.form.bits), **by_tiles}

    def _k_quant(self, quant: KQuant) -> dict[str, npt.NDArray]:
        rows, factors = len(self.integers), [self.scales]
        scales, integers = self.subscales, self.integers.reshape(rows, -1)
        assert scales is not None
        if self.offsets is not None and self.suboffsets is not None:
            by_chunk = [each.reshape(rows, -1, 1, CHUNK // quant.group) for each in (scales, self.suboffsets)]
            scales, factors = np.concatenate(by_chunk, axis=2).reshape(rows, -1), [self.scales, -self.offsets]
        return {
            f"tiles{quant.group}": quant.stored_integers(integers),
            "scales": scales,
            "factors": np.stack(factors, axis=2).reshape(rows, -1).astype(np.float16),
        }

    def _tiles(self) -> dict[str, npt.NDArray]:
        integers = wide(self.integers.reshape(len(self.integers), -1), padded_inner(self.inner))
        count = scales_of_output(self.inner, self.form.group_size)
        arrays = {
            f"tiles{self.form.group_size}": (in_tiles if self.form.bits == 4 else bytes_in_tiles)(integers),
            "scales": wide(self.scales, count).astype(numpy_dtype(self.form.scales)),
        }
        return arrays if self.zeros is None else arrays | {"zeros": nibbles(wide(self.zeros, count))}


def quantize(
    matrix: npt.NDArray[np.float32], form: LowBitFormat, scales_in: npt.DTypeLike = np.float32
) -> QuantizedMatrix:
    """Quantize ``matrix`` [rows, inner] by rounding to nearest, without zero points.

    The scales are rounded to the dtype ``scales_in``. With 8 bits the largest value of a group becomes the largest
    integer. With 4 bits each group uses the one of 13 ranges that leaves the least squared error.
    """
    step = max(1, _AT_ONCE // matrix.shape[1])
    parts = [_quantized(matrix[at : at + step], form, scales_in) for at in range(0, len(matrix), step)]
    integers, scales = (np.concatenate(each) for each in zip(*parts, strict=True))
    return QuantizedMatrix(form, matrix.shape[1], integers, scales)


def nibbles(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pack pairs of 4-bit integers of the last dimension into bytes, the first integer in the low half."""
    even = np.concatenate([values, np.zeros_like(values[..., :1])], -1) if values.shape[-1] % 2 else values
    packed: npt.NDArray[np.uint8] = even[..., 0::2] | (even[..., 1::2] << np.uint8(4))
    return packed


def wide(values: npt.NDArray, columns: int) -> npt.NDArray:
    """Pad ``values`` [rows, fewer] with zeros to [rows, ``columns``]."""
    return np.pad(values, [(0, 0), (0, columns - values.shape[1])])


def _quantized(
    matrix: npt.NDArray[np.float32], form: LowBitFormat, scales_in: npt.DTypeLike
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Return the integers and the scales of ``matrix``, some rows of a larger matrix."""

    def round_scales(scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return scales.astype(scales_in).astype(np.float32)

    (rows, inner), most = matrix.shape, (1 << (form.bits - 1)) - 1
    padded = np.zeros((rows, -(-inner // form.group_size) * form.group_size), np.float32)
    padded[:, :inner] = matrix
    groups = padded.reshape(rows, -1, form.group_size)
    largest = np.abs(groups).max(axis=2) / np.float32(most)
    scales = round_scales(largest)
    integers = _rounded(groups, scales, most)
    if form.bits == 4:
        least = _error(groups, integers, scales)
        for share in _SHRUNK[1:]:
            tried = round_scales(largest * share)
            rounded = _rounded(groups, tried, most)
            error = _error(groups, rounded, tried)
            better = error < least
            least = np.where(better, error, least)
            scales = np.where(better, tried, scales)
            integers = np.where(better[:, :, None], rounded, integers)
    return (integers + (most + 1)).astype(np.uint8), scales.astype(np.float32)


def _rounded(groups: npt.NDArray[np.float32], scales: npt.NDArray[np.float32], most: int) -> npt.NDArray[np.float32]:
    divisors = np.where(scales > 0, scales, np.float32(1))[:, :, None]
    # The range has one more integer below zero than above: 8 bits leave it unused, 4 bits use it.
    return np.rint(groups / divisors).clip(-most - (most == 7), most)


def _error(
    groups: npt.NDArray[np.float32], integers: npt.NDArray[np.float32], scales: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    error: npt.NDArray[np.float32] = np.square(integers * scales[:, :, None] - groups).sum(axis=2)
    return error

"""A matrix as integers of 8 or 4 bits with a scale for every block of one row: the format of onnxruntime's MatMulNBits.

A value is (integer - zero point) * scale; without zero points the middle of the range is zero. Two integers of 4 bits
are a byte, the first one in its low half. Products on a GPU take them in another order (plugins/reference/int4.py).
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tandemrt.plugins.reference.int4 import in_tiles, padded_inner, scales_of_output

BLOCK = 32  # values per scale: as fast as wider blocks (docs/benchmarks.md), and the most exact
_AT_ONCE = 1 << 22  # values that are quantized together, which bounds the memory that takes
_SHRUNK = np.linspace(1.0, 0.7, 13, dtype=np.float32)  # of a block's range, tried for 4 bits


@dataclass(frozen=True)
class Form:
    """How the weight of a product is held: ``bits`` per value, ``block`` values per scale, whether with ``zeros``.

    ``tiles``: as the operator int4_product takes it, with scales in this dtype; None: as MatMulNBits does, in float32.
    """

    bits: int
    block: int
    zeros: bool = False
    tiles: str | None = None

    @property
    def scales(self) -> str:
        """The dtype of the scales."""
        return self.tiles or "float32"

    def shapes(self, rows: int, inner: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype and shape of what holds a matrix [rows, inner]: its integers, scales and zero points."""
        count = scales_of_output(inner, self.block) if self.tiles else -(-inner // self.block)  # the last may be padded
        found: dict[str, tuple[str, tuple[int, ...]]] = (
            {f"tiles{self.block}": ("uint8", (rows, padded_inner(inner) // 2))}
            if self.tiles
            else {"integers": ("uint8", (rows, count, self.block * self.bits // 8))}
        )
        found["scales"] = (self.scales, (rows, count))
        return found | ({"zeros": ("uint8", (rows, -(-count * self.bits // 8)))} if self.zeros else {})


@dataclass(frozen=True)
class Blocks:
    """A matrix [rows, ``inner``] as ``integers`` uint8 [rows, blocks, block], one to a byte, and ``scales`` float32
    [rows, blocks]; ``zeros`` uint8 [rows, blocks] are the zero points, None: all in the middle of the range."""

    form: Form
    inner: int
    integers: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    zeros: npt.NDArray[np.uint8] | None = None

    @cached_property
    def restored(self) -> npt.NDArray[np.float32]:
        """The matrix that they stand for."""
        zeros = np.float32(1 << (self.form.bits - 1)) if self.zeros is None else self.zeros[:, :, None]
        values = (self.integers.astype(np.float32) - zeros) * self.scales[:, :, None]
        matrix: npt.NDArray[np.float32] = values.reshape(len(values), -1)[:, : self.inner]
        return matrix

    def stored(self) -> dict[str, npt.NDArray]:
        """What is written, by the names of Form.shapes."""
        if self.form.tiles:
            return self._tiles()
        packed = nibbles if self.form.bits == 4 else np.asarray
        found: dict[str, npt.NDArray] = {"integers": packed(self.integers), "scales": self.scales}
        return found if self.zeros is None else found | {"zeros": packed(self.zeros)}

    def _tiles(self) -> dict[str, npt.NDArray]:
        integers = _wide(self.integers.reshape(len(self.integers), -1), padded_inner(self.inner))
        count = scales_of_output(self.inner, self.form.block)
        found = {
            f"tiles{self.form.block}": in_tiles(integers),
            "scales": _wide(self.scales, count).astype(numbers_of(self.form.scales)),
        }
        return found if self.zeros is None else found | {"zeros": nibbles(_wide(self.zeros, count))}


def numbers_of(dtype: str) -> np.dtype:
    """What numpy calls a dtype of the project."""
    return np.dtype(getattr(ml_dtypes, dtype, dtype))


def quantize(matrix: npt.NDArray[np.float32], form: Form, scales_in: npt.DTypeLike = np.float32) -> Blocks:
    """Round ``matrix`` [rows, inner] to the nearest, without zero points, with scales that ``scales_in`` holds.

    With 8 bits the largest value of a block is the largest integer. With 4 the range of each block is the one of 13
    that leaves the least error (squared).
    """
    step = max(1, _AT_ONCE // matrix.shape[1])
    parts = [_quantized(matrix[at : at + step], form, scales_in) for at in range(0, len(matrix), step)]
    integers, scales = (np.concatenate(each) for each in zip(*parts, strict=True))
    return Blocks(form, matrix.shape[1], integers, scales)


def nibbles(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Two integers of the last dimension in a byte, the first one in its low half."""
    even = np.concatenate([values, np.zeros_like(values[..., :1])], -1) if values.shape[-1] % 2 else values
    packed: npt.NDArray[np.uint8] = even[..., 0::2] | (even[..., 1::2] << np.uint8(4))
    return packed


def _wide(values: npt.NDArray, columns: int) -> npt.NDArray:
    """``values`` [rows, fewer] with zeros behind them."""
    return np.pad(values, [(0, 0), (0, columns - values.shape[1])])


def _quantized(
    matrix: npt.NDArray[np.float32], form: Form, scales_in: npt.DTypeLike
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Integers and scales of some rows."""

    def held(scales: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return scales.astype(scales_in).astype(np.float32)

    (rows, inner), most = matrix.shape, (1 << (form.bits - 1)) - 1
    padded = np.zeros((rows, -(-inner // form.block) * form.block), np.float32)
    padded[:, :inner] = matrix
    blocks = padded.reshape(rows, -1, form.block)
    largest = np.abs(blocks).max(axis=2) / np.float32(most)
    scales = held(largest)
    integers = _rounded(blocks, scales, most)
    if form.bits == 4:
        least = _error(blocks, integers, scales)
        for share in _SHRUNK[1:]:
            tried = held(largest * share)
            rounded = _rounded(blocks, tried, most)
            error = _error(blocks, rounded, tried)
            better = error < least
            least = np.where(better, error, least)
            scales = np.where(better, tried, scales)
            integers = np.where(better[:, :, None], rounded, integers)
    return (integers + (most + 1)).astype(np.uint8), scales.astype(np.float32)


def _rounded(blocks: npt.NDArray[np.float32], scales: npt.NDArray[np.float32], most: int) -> npt.NDArray[np.float32]:
    divisors = np.where(scales > 0, scales, np.float32(1))[:, :, None]
    # One integer more lies below zero than above; 8 bits leave it, 4 have none to spare.
    return np.rint(blocks / divisors).clip(-most - (most == 7), most)


def _error(
    blocks: npt.NDArray[np.float32], integers: npt.NDArray[np.float32], scales: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    error: npt.NDArray[np.float32] = np.square(integers * scales[:, :, None] - blocks).sum(axis=2)
    return error

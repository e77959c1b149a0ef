"""Read MXFP4 and NVFP4 weights: floats of 4 bits with a scale per group.

A byte holds two floats, the first one in its low half. A scale of MXFP4 is the exponent of a power of 2, with a bias of
127. A scale of NVFP4 is a float8_e4m3fn number times the scale of the tensor. Matmuls on a GPU read the floats. On a
CPU they choose among the integers of a table, because twice a 4-bit float is an integer up to 12.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.quantize.groups import QuantizedMatrix, wide
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.quantization.mxfp4 import GROUP_SIZE as MXFP4_GROUP
from tandemrt.export.read.quantization.nvfp4 import GROUP_SIZE as NVFP4_GROUP
from tandemrt.export.read.values import read_values, require_scales
from tandemrt.plugins.operators.float4 import floats_in_tiles
from tandemrt.plugins.operators.float8 import FLOAT8
from tandemrt.plugins.operators.int4_layout import padded_inner, scales_of_output, unpacked

GROUPS = {"mxfp4": MXFP4_GROUP, "nvfp4": NVFP4_GROUP}
_LARGEST_POWER = np.float32(2**8)  # of 2 in float8_e4m3fn


@dataclass(frozen=True)
class Float4Matrix:
    """A matrix [rows, inner] of floats of 4 bits; a value is float * scale * factor.

    ``codes``: uint8 [rows, groups, group size], one per byte. ``scales``: float32 [rows, groups]. ``factors``: float32
    [rows, 1].
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    factors: npt.NDArray[np.float32]

    @property
    def as_integers(self) -> QuantizedMatrix:
        """The matrix in groups that choose among 8-bit integers: twice the floats."""
        _, groups, size = self.codes.shape
        scales = self.scales * self.factors * np.float32(0.5)  # values are doubled
        return QuantizedMatrix(LowBitFormat(4, size, table="mxfp4"), groups * size, self.codes, scales)

    @property
    def stored_scales(self) -> npt.NDArray:
        """The scales in float8_e4m3fn, as a GPU reads them. Powers of 2 lose those below 2**-17 of a row's largest."""
        return self.scales.astype(FLOAT8)

    def stored(self) -> dict[str, npt.NDArray]:
        """Return the arrays to write for a GPU, keyed as in ``LowBitFormat.shapes``."""
        rows, groups, size = self.codes.shape
        inner = groups * size
        return {
            f"tiles{size}": floats_in_tiles(wide(self.codes.reshape(rows, inner), padded_inner(inner))),
            "scales": wide(self.stored_scales.view(np.uint8), scales_of_output(inner, size)),
            "factors": self.factors[:, 0],
        }


def read_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> Float4Matrix:
    """Read a weight [rows, inner] from ``blocks`` uint8, two values per byte, and ``scales`` uint8 [rows, inner / 32].

    The largest scale of a row becomes the largest power of 2 in float8_e4m3fn. Raises BadCheckpoint for a scale of 255,
    which is not a number.
    """
    powers = read_powers(scales)
    return mxfp4_matrix(unpacked(read_values(blocks)).reshape(*powers.shape, MXFP4_GROUP), powers)


def mxfp4_matrix(codes: npt.NDArray[np.uint8], powers: npt.NDArray[np.float32]) -> Float4Matrix:
    """Return the matrix with ``codes`` uint8 [rows, groups, 32] and scales that are powers of 2, [rows, groups]."""
    factors = powers.max(axis=1, keepdims=True) / _LARGEST_POWER
    return Float4Matrix(codes, powers / factors, factors)


def read_powers(scales: StoredTensor) -> npt.NDArray[np.float32]:
    """Read scales of an MX format: exponents of powers of 2 in uint8, with a bias of 127.

    Raises BadCheckpoint for an exponent of 255, which is not a number.
    """
    exponents = read_values(scales)
    if (exponents == 255).any():
        raise BadCheckpoint(
            f"{scales.file}: tensor {quoted(scales.name)} should hold exponents below 255, which is not a number in "
            f"MX formats; it holds {int((exponents == 255).sum())} values of 255; download the checkpoint again"
        )
    return np.ldexp(np.float32(1), exponents.astype(np.int32) - 127).astype(np.float32)


def read_nvfp4(packed: StoredTensor, scales: StoredTensor, of_tensor: StoredTensor, *, divides: bool) -> Float4Matrix:
    """Read a weight [rows, inner] from ``packed`` uint8 [rows, inner / 2] and ``scales`` [rows, inner / 16].

    ``of_tensor`` is one float32, by which each of ``scales`` is multiplied, or divided if ``divides``. A scale of zero
    belongs to a group of zeros. Raises BadCheckpoint for a scale of the tensor that is not above zero, and for a
    negative scale or one that is not a number.
    """
    require_scales(of_tensor)
    factor = read_values(of_tensor).astype(np.float32).reshape(())
    of_groups = read_values(scales).astype(np.float32)
    wrong = ~(np.isfinite(of_groups) & (of_groups >= 0))
    if wrong.any():
        raise BadCheckpoint(
            f"{scales.file}: tensor {quoted(scales.name)} should hold scales, finite and not below 0; "
            f"{int(wrong.sum())} of {wrong.size} are not; download the checkpoint again"
        )
    codes = unpacked(read_values(packed)).reshape(*of_groups.shape, NVFP4_GROUP)
    factors = np.full((len(codes), 1), np.float32(1) / factor if divides else factor, np.float32)
    return Float4Matrix(codes, of_groups, factors)

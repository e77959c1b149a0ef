"""Convert MXFP4 and NVFP4 weights to 8-bit integer groups: twice a 4-bit float is an integer up to 12.

A byte holds two floats, the first one in its low half. A scale of MXFP4 is the exponent of a power of 2, with a bias of
127. A scale of NVFP4 is a float8_e4m3fn number times the scale of the tensor.
"""

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.quantize.groups import QuantizedMatrix
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.quantization.mxfp4 import GROUP_SIZE as MXFP4_GROUP
from tandemrt.export.read.quantization.nvfp4 import GROUP_SIZE as NVFP4_GROUP
from tandemrt.export.read.values import read_values, require_scales
from tandemrt.plugins.operators.int4_layout import unpacked

_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # twice each 4-bit float, without its sign, which is the highest bit
_ZERO = 128  # the zero point of 8-bit groups
_INTEGERS = np.array([_ZERO + sign * twice for sign in (1, -1) for twice in _TWICE], np.uint8)
MXFP4_FORM = LowBitFormat(8, MXFP4_GROUP)
NVFP4_FORM = LowBitFormat(8, NVFP4_GROUP)


def read_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> QuantizedMatrix:
    """Read a weight [rows, inner] from ``blocks`` uint8, two values per byte, and ``scales`` uint8 [rows, inner / 32].

    Raises BadCheckpoint for a scale of 255, which is not a number.
    """
    powers = read_powers(scales)
    codes = unpacked(read_values(blocks)).reshape(*powers.shape, MXFP4_GROUP)
    # Values are doubled. The smallest power, 2**-127, is a denormal number, and half of it too.
    return QuantizedMatrix(MXFP4_FORM, powers.shape[1] * MXFP4_GROUP, _INTEGERS[codes], powers * np.float32(0.5))


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


def read_nvfp4(
    packed: StoredTensor, scales: StoredTensor, of_tensor: StoredTensor, *, divides: bool
) -> QuantizedMatrix:
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
    of_groups = (of_groups / factor if divides else of_groups * factor) * np.float32(0.5)  # values are doubled
    codes = unpacked(read_values(packed)).reshape(*of_groups.shape, NVFP4_GROUP)
    return QuantizedMatrix(NVFP4_FORM, of_groups.shape[1] * NVFP4_GROUP, _INTEGERS[codes], of_groups)

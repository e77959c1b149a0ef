"""Convert MXFP4 weights to 8-bit integer groups without loss: twice a 4-bit float is an integer up to 12.

A byte holds two floats, the first one in its low half. A scale is the exponent of a power of 2, with a bias of 127.
"""

import numpy as np

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.quantize.groups import QuantizedMatrix
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.quantization.mxfp4 import GROUP_SIZE
from tandemrt.export.read.values import read_values
from tandemrt.plugins.operators.int4_layout import unpacked

_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # twice each 4-bit float, without its sign, which is the highest bit
_ZERO = 128  # the zero point of 8-bit groups
_INTEGERS = np.array([_ZERO + sign * twice for sign in (1, -1) for twice in _TWICE], np.uint8)
FORM = LowBitFormat(8, GROUP_SIZE)


def read_mxfp4(blocks: StoredTensor, scales: StoredTensor) -> QuantizedMatrix:
    """Read a weight [rows, inner] from ``blocks`` uint8 [rows, inner / 32, 16] and ``scales`` uint8 [rows, inner / 32].

    Raises BadCheckpoint for a scale of 255, which is not a number.
    """
    exponents, packed = read_values(scales), read_values(blocks)
    if (exponents == 255).any():
        raise BadCheckpoint(
            f"{scales.file}: tensor {quoted(scales.name)} should hold exponents below 255, which is not a number in "
            f"MXFP4; it holds {int((exponents == 255).sum())} values of 255; download the checkpoint again"
        )
    codes = unpacked(packed).reshape(*exponents.shape, GROUP_SIZE)
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)  # bias 127, and 1 for the doubled values
    return QuantizedMatrix(FORM, exponents.shape[1] * GROUP_SIZE, _INTEGERS[codes], powers.astype(np.float32))

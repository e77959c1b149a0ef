"""Weights in MXFP4 as blocks of 8 bits, which hold them exactly: twice a float of 4 bits is an integer up to 12.

A byte holds two floats, the first one in its low half; a scale is the exponent of a power of 2, with a bias of 127.
"""

import numpy as np

from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.quantize.blocks import Blocks, Form
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.quantization.mxfp4 import BLOCK
from tandemrt.export.read.values import values
from tandemrt.plugins.reference.int4 import halves

_TWICE = (0, 1, 2, 3, 4, 6, 8, 12)  # the floats of 4 bits, but for their sign, which is the highest bit
_ZERO = 128  # what stands for 0 in blocks of 8 bits
_INTEGERS = np.array([_ZERO + sign * twice for sign in (1, -1) for twice in _TWICE], np.uint8)
FORM = Form(8, BLOCK)


def read_mxfp4_blocks(blocks: StoredTensor, scales: StoredTensor) -> Blocks:
    """Read a weight [rows, inner] from ``blocks`` uint8 [rows, inner / 32, 16] and ``scales`` uint8 [rows, inner / 32].

    Raises BadCheckpoint for a scale of no meaning.
    """
    exponents, packed = values(scales), values(blocks)
    if (exponents == 255).any():
        raise BadCheckpoint(
            f"{scales.file}: tensor {quoted(scales.name)} should hold exponents below 255, which is no number in "
            f"MXFP4; it holds {int((exponents == 255).sum())} of it; download the checkpoint again"
        )
    codes = halves(packed).reshape(*exponents.shape, BLOCK)
    powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)  # 127, and one for what is twice as large
    return Blocks(FORM, exponents.shape[1] * BLOCK, _INTEGERS[codes], powers.astype(np.float32))

"""4-bit floats (e2m1) of ``float4_matmul``: their values, how many share a scale, and their order.

Words, their order and padding are those of 4-bit integers (plugins/operators/int4_layout.py). Within a word each float
is divided, so that a kernel moves the floats of a pair to their places in 16-bit numbers with few instructions
(plugins/kernels/float4.cuh).
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.int4_layout import ROWS_AT_ONCE, by_input, in_tiles

_MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
VALUES = np.array([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], np.float32)  # by code; the highest bit is the sign
GROUP_SIZES = (16, 32)  # inputs that share a scale: NVFP4, MXFP4

_PARTS = ((0, 1), (1, 3), (3, 1))  # of a code: its first bit and the mask of its bits
_EVEN_AT = ((6, 9, 12, 4), (7, 10, 13, 0), (15, 18, 21, 3))  # their places in a word, for the even input of each pair
# Where the parts of the codes lie: the place in a word for each of the four even inputs and then of the odd ones, which
# lie 16 bits further, the mask, and the place in a code.
PLACES = tuple(
    (np.array([*places, *((place + 16) % 32 for place in places)], np.uint32), np.uint32(mask), np.uint32(bit))
    for (bit, mask), places in zip(_PARTS, _EVEN_AT, strict=True)
)


def floats_in_tiles(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pack ``codes`` uint8 [width, inner], one per byte, into uint8 [width, inner / 2] in the order of float4_matmul.

    ``inner`` is a multiple of 128.
    """
    packed = in_tiles(codes)
    for start in range(0, len(packed), ROWS_AT_ONCE):
        halves = packed[start : start + ROWS_AT_ONCE].view("<u2")
        moved = _moved_halves()[halves]
        even, odd = moved[:, ::2], moved[:, 1::2]
        halves.view("<u4")[:] = even | odd << np.uint32(16) | odd >> np.uint32(16)
    return packed


def floats_from_tiles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the codes of ``floats_in_tiles``, one per byte: uint8 [width, inner]."""
    words = np.ascontiguousarray(packed).view("<u4")[..., None]
    codes = np.zeros((*words.shape[:-1], 8), np.uint8)
    for places, mask, bit in PLACES:
        codes |= ((words >> places & mask) << bit).astype(np.uint8)
    return by_input(codes)


@cache
def _moved_halves() -> npt.NDArray[np.uint32]:
    """Return the word for each lower half of a word of 4-bit integers whose upper half is 0."""
    halves = np.arange(1 << 16, dtype=np.uint32)
    words = np.zeros_like(halves)
    for places, mask, bit in PLACES:
        for pair, place in enumerate(places[:4]):
            words |= (halves >> np.uint32(4 * pair + bit) & mask) << place
    return words

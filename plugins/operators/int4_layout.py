"""Layout of a 4-bit weight of ``int4_matmul``: order of the integers, number of scales, packing.

A scale belongs to a quantization group: 32, 64 or 128 neighbouring inputs of one output.
"""

import numpy as np
import numpy.typing as npt

CHUNK = 128  # consecutive inputs of one output, stored as four runs of 32
GROUP_SIZES = (32, 64, 128)  # inputs that share a scale
_AT_ONCE = 4  # scales, and zero points, that a kernel reads with one load
ROWS_AT_ONCE = 64  # of a matrix: its 64-bit words and what they become fit in a cache
_EVEN_BYTES = np.uint64(0x000F000F000F000F)
_TOGETHER = np.uint64(1 << 48 | 1 << 36 | 1 << 24 | 1 << 12)  # times the even bytes: their four integers from bit 48 on


def padded_inner(inner: int) -> int:
    """Return the number of inputs stored per output: ``inner``, rounded up to whole chunks of 128."""
    return -(-inner // CHUNK) * CHUNK


def scales_of_output(inner: int, group_size: int) -> int:
    """Return the number of scales, and of zero points, stored per output: a multiple of 4."""
    return -(-padded_inner(inner) // group_size // _AT_ONCE) * _AT_ONCE


def in_tiles(integers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pack ``integers`` uint8 [width, inner], one per byte, into uint8 [width, inner / 2] in the order of int4_matmul.

    ``inner`` is a multiple of 128. A word holds eight inputs; the even ones are its lower four integers. The first word
    of each run of 32 comes first, then the second word of each run, and so on. The four threads that share an output in
    a tensor core's tile therefore read 16 bytes each and always work on the same run.
    """
    packed = np.empty((len(integers), integers.shape[1] // 2), np.uint8)
    for start in range(0, len(integers), ROWS_AT_ONCE):
        eights = np.ascontiguousarray(integers[start : start + ROWS_AT_ONCE]).view("<u8")
        even = (eights & _EVEN_BYTES) * _TOGETHER >> np.uint64(48)
        odd = (eights >> np.uint64(8) & _EVEN_BYTES) * _TOGETHER >> np.uint64(48)
        words = (even | odd << np.uint64(16)).astype("<u4").reshape(len(eights), -1, 4, 4)  # chunk, run, word
        packed[start : start + ROWS_AT_ONCE] = words.swapaxes(2, 3).reshape(len(eights), -1).view(np.uint8)
    return packed


def from_tiles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the integers of ``in_tiles``, one per byte: uint8 [width, inner]."""
    return by_input(unpacked(packed))


def by_input(integers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return ``integers`` [width, ...], eight of each word and the even ones first, in the order of the inputs."""
    words = integers.reshape(len(integers), -1, 4, 4, 2, 4).transpose(0, 1, 3, 2, 5, 4)
    return words.reshape(len(integers), -1)


def unpacked(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the 4-bit integers of uint8 [..., bytes], one per byte: [..., 2 * bytes], the low half of a byte first."""
    pairs = packed.astype("<u2", order="C")
    integers: npt.NDArray[np.uint8] = ((pairs | pairs << np.uint16(4)) & np.uint16(0x0F0F)).view(np.uint8)
    return integers

"""Layout of a 4-bit weight of ``int4_int8_matmul``: the integers of eight outputs alternate.

A vector register therefore holds four inputs of eight outputs, and no sum crosses its lanes.
"""

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.int4_layout import unpacked

OUTPUTS = 8  # outputs of a tile
STEP = 32  # inputs whose products are summed as integers; inputs of a matmul are padded to whole steps
TINY = np.float32(1e-30)  # a step of inputs whose largest one is not above counts as zeros
_TILE_BYTES = OUTPUTS * STEP // 2


def interleaved_shape(width: int, inner: int) -> tuple[int, int]:
    """Return the shape of the integers of a weight [width, inner]."""
    return -(-width // OUTPUTS), -(-inner // STEP) * _TILE_BYTES


def interleaved(integers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Pack ``integers`` uint8 [width, inner], one per byte, into uint8 [tiles, bytes].

    32 bytes hold eight inputs of a tile's outputs: four inputs per output in the low halves, the next four in the
    high halves.
    """
    tiles, nbytes = interleaved_shape(*integers.shape)
    padded = np.zeros((tiles * OUTPUTS, nbytes // _TILE_BYTES * STEP), np.uint8)
    padded[: integers.shape[0], : integers.shape[1]] = integers
    halves = padded.reshape(tiles, OUTPUTS, -1, 2, 4).transpose(0, 2, 1, 4, 3)  # tile, eight inputs, output, four, half
    packed: npt.NDArray[np.uint8] = halves[..., 0] | halves[..., 1] << np.uint8(4)
    return packed.reshape(tiles, nbytes)


def deinterleaved(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the integers of ``packed``, one per byte: uint8 [tiles * 8, padded inputs]."""
    halves = unpacked(packed).reshape(len(packed), -1, OUTPUTS, 4, 2)
    integers: npt.NDArray[np.uint8] = halves.transpose(0, 2, 1, 4, 3).reshape(len(packed) * OUTPUTS, -1)
    return integers


def by_tile(values: npt.NDArray) -> npt.NDArray:
    """Return one value per output and group, [width, groups], as [tiles, groups * 8]: the outputs alternate."""
    tiles = -(-len(values) // OUTPUTS)
    padded = np.pad(values, [(0, tiles * OUTPUTS - len(values)), (0, 0)])
    return np.ascontiguousarray(padded.reshape(tiles, OUTPUTS, -1).transpose(0, 2, 1)).reshape(tiles, -1)


def by_output(values: npt.NDArray) -> npt.NDArray:
    """Return the values of ``by_tile`` as [tiles * 8, groups]."""
    return values.reshape(len(values), -1, OUTPUTS).transpose(0, 2, 1).reshape(len(values) * OUTPUTS, -1)

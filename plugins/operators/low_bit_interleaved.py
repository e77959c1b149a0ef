"""Layout of a weight of ``low_bit_int8_matmul``, of 4, 5, 6 or 8 bits: the integers of eight outputs alternate.

A vector register therefore holds four inputs of eight outputs, and no sum crosses its lanes.
"""

import numpy as np
import numpy.typing as npt

OUTPUTS = 8  # outputs of a tile
STEP = 32  # inputs whose products are summed as integers; inputs of a matmul are padded to whole steps
TINY = np.float32(1e-30)  # a step of inputs whose largest one is not above counts as zeros
# Inputs that share a scale, by the bits of an integer.
GROUP_SIZES = {4: (32, 64, 128), 5: (32,), 6: (16,), 8: (32, 64, 128)}
RUNS = STEP // 4  # of four inputs
_LOW, _FOUR = np.uint8(15), np.uint8(4)
_LOW_HALVES = np.uint32(0x0F0F0F0F)  # of four bytes


def step_bytes(bits: int) -> int:
    """Return the number of bytes that hold a step of a tile."""
    return OUTPUTS * STEP * bits // 8


def interleaved_shape(width: int, inner: int, bits: int) -> tuple[int, int]:
    """Return the shape of the integers of a weight [width, inner]."""
    return -(-width // OUTPUTS), -(-inner // STEP) * step_bytes(bits)


def interleaved(integers: npt.NDArray[np.uint8], bits: int = 4) -> npt.NDArray[np.uint8]:
    """Pack ``integers`` uint8 [width, inner], one per byte, into uint8 [tiles, bytes].

    A step has eight runs of four inputs. 32 bytes hold the lower 4 bits of two runs: four inputs per output in the low
    halves, the next four in the high halves. After them 32 bytes hold the fifth bits of all runs, or twice 32 bytes
    the two upper bits of four runs, the first run in the lowest bits. With 8 bits the runs follow one another.
    """
    width, inner = integers.shape
    tiles, nbytes = interleaved_shape(width, inner, bits)
    steps = nbytes // step_bytes(bits)
    padded = integers
    if integers.shape != (tiles * OUTPUTS, steps * STEP) or not integers.flags.c_contiguous:
        padded = np.zeros((tiles * OUTPUTS, steps * STEP), np.uint8)
        padded[:width, :inner] = integers
    # A word is a run of an output. With the runs first, numpy computes with long stretches of memory.
    runs = np.ascontiguousarray(padded.view(np.uint32).reshape(tiles, OUTPUTS, steps, RUNS).transpose(3, 0, 2, 1))
    if bits == 8:
        return np.ascontiguousarray(runs.transpose(1, 2, 0, 3)).view(np.uint8).reshape(tiles, nbytes)
    packed = np.empty((tiles, steps, bits, OUTPUTS), np.uint32)
    planes = packed.transpose(2, 0, 1, 3)
    planes[: RUNS // 2] = runs[0::2] & _LOW_HALVES | (runs[1::2] & _LOW_HALVES) << _FOUR
    if more := bits - 4:
        shifts = np.arange(0, 8, more, dtype=np.uint32)[:, None, None, None]
        upper = (runs >> _FOUR & _LOW_HALVES).reshape(more, -1, *runs.shape[1:])
        planes[RUNS // 2 :] = np.bitwise_or.reduce(upper << shifts, axis=1)
    return packed.view(np.uint8).reshape(tiles, nbytes)


def deinterleaved(packed: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    """Return the integers of ``packed``, one per byte: uint8 [tiles * 8, padded inputs]."""
    steps = packed.reshape(len(packed), -1, step_bytes(bits) // (OUTPUTS * 4), OUTPUTS * 4)
    shape = (*steps.shape[:2], RUNS, OUTPUTS, 4)
    if bits == 8:
        runs = steps.reshape(shape)
    else:
        halves = steps[:, :, : RUNS // 2]
        runs = np.stack([halves & _LOW, halves >> _FOUR], axis=3).reshape(shape)
        if more := bits - 4:
            shifts = np.arange(0, 8, more, dtype=np.uint8)[:, None]
            planes = steps[:, :, RUNS // 2 :, None] >> shifts & np.uint8((1 << more) - 1)
            runs |= planes.reshape(shape) << _FOUR
    return runs.transpose(0, 3, 1, 2, 4).reshape(len(packed) * OUTPUTS, -1)


def by_tile(values: npt.NDArray) -> npt.NDArray:
    """Return one value per output and group, [width, groups], as [tiles, groups * 8]: the outputs alternate."""
    tiles = -(-len(values) // OUTPUTS)
    padded = np.pad(values, [(0, tiles * OUTPUTS - len(values)), (0, 0)])
    return np.ascontiguousarray(padded.reshape(tiles, OUTPUTS, -1).transpose(0, 2, 1)).reshape(tiles, -1)


def by_output(values: npt.NDArray) -> npt.NDArray:
    """Return the values of ``by_tile`` as [tiles * 8, groups]."""
    return values.reshape(len(values), -1, OUTPUTS).transpose(0, 2, 1).reshape(len(values) * OUTPUTS, -1)

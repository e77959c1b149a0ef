"""Layout of a weight of ``tiled_matmul``: the values of sixteen outputs alternate.

Two vector registers therefore hold one input of sixteen outputs, and a matmul reads a weight from its first byte to its
last. The dtype of the values is the checkpoint's.
"""

import numpy as np
import numpy.typing as npt

OUTPUTS = 16  # outputs of a tile


def tiled_shape(width: int, inner: int) -> tuple[int, int]:
    """Return the shape of the tiles of a weight [width, inner]."""
    return -(-width // OUTPUTS), inner * OUTPUTS


def tiled(weight: npt.NDArray) -> npt.NDArray:
    """Return ``weight`` [width, inner] as [tiles, inner * 16]: each input of a tile's outputs, one after the other."""
    tiles, _ = tiled_shape(*weight.shape)
    if missing := tiles * OUTPUTS - len(weight):
        weight = np.pad(weight, [(0, missing), (0, 0)])
    by_input = weight.reshape(tiles, OUTPUTS, -1).transpose(0, 2, 1)
    return np.ascontiguousarray(by_input).reshape(tiles, -1)


def untiled(tiles: npt.NDArray) -> npt.NDArray:
    """Return the weight of ``tiled`` as [tiles * 16, inner]."""
    return tiles.reshape(len(tiles), -1, OUTPUTS).transpose(0, 2, 1).reshape(len(tiles) * OUTPUTS, -1)

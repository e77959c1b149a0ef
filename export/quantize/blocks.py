"""A matrix as 8-bit integers with a scale for every block of one row: the format of onnxruntime's MatMulNBits.

Symmetric: a value is (byte - 128) * scale.
https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

import numpy as np
import numpy.typing as npt

BITS = 8
BLOCK = 32  # values per scale: as fast as wider blocks (docs/benchmarks.md), and the most exact
_ZERO, _MOST = 128, 127


def blocks_in(inner: int) -> int:
    """Blocks of a row of ``inner`` values; the last one may be padded."""
    return -(-inner // BLOCK)


def quantize(
    matrix: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Round ``matrix`` [rows, inner] to the nearest: bytes [rows, blocks, BLOCK], scales [rows, blocks], the matrix so.

    What is returned last is what the integers stand for, shaped as ``matrix``.
    """
    rows, inner = matrix.shape
    padded = np.zeros((rows, blocks_in(inner) * BLOCK), np.float32)
    padded[:, :inner] = matrix
    blocks = padded.reshape(rows, -1, BLOCK)
    scales = (np.abs(blocks).max(axis=2) / np.float32(_MOST)).astype(np.float32)
    divisors = np.where(scales > 0, scales, np.float32(1))[:, :, None]
    integers = np.rint(blocks / divisors).clip(-_MOST, _MOST)
    restored = (integers * scales[:, :, None]).reshape(rows, -1)[:, :inner]
    return (integers + _ZERO).astype(np.uint8), scales, restored.astype(np.float32)

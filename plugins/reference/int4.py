"""Products with weights of 4 bits, and the order in which kernels read them."""

import numpy as np
import numpy.typing as npt

CHUNK = 128  # inputs of an output that lie together, in four runs of 32
_PAIRS = np.array([byte & 15 | byte >> 4 << 8 for byte in range(256)], "<u2")  # a byte's two integers, a byte each
_MIDDLE = 8  # the zero point of weights without zero points
_ORDER = (4, 4, 4)  # of a chunk: runs of inputs, words of a run, bytes of a word (two inputs each, the low half first)


def in_tiles(packed: np.ndarray) -> np.ndarray:
    """Return uint8 [width, inner / 2], two inputs to a byte, the first in its low half, in the order of int4_product.

    The first word of 8 inputs of each run of 32 comes first, then the second of each: so the four threads that share
    an output in a tensor core's tile read 16 bytes each and are always at the same run. ``inner`` is a multiple of 128.
    """
    return _swapped(packed)


def int4_product(x: np.ndarray, weight: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None) -> np.ndarray:
    """Return x @ w.T, rounded to the dtype of ``x`` [..., inner] once, for w = (integer - zero point) * scale.

    ``weight`` uint8 [width, padded / 2] are the integers as in_tiles has them, padded behind ``inner`` to a multiple
    of 128. ``scales`` [width, blocks], in the dtype of ``x``, are those of equal blocks of the padded inputs: of 32,
    64 or 128. ``zeros`` uint8 [width, ceil(blocks / 2)] are two to a byte, the first in its low half; without them
    all are 8.
    """
    width, blocks = scales.shape
    integers = halves(_swapped(weight)).reshape(width, blocks, -1).astype(np.float64)
    middles = np.float64(_MIDDLE) if zeros is None else halves(zeros)[:, :blocks, None].astype(np.float64)
    numbers = ((integers - middles) * scales.astype(np.float64)[:, :, None]).reshape(width, -1)
    product: np.ndarray = x.astype(np.float64) @ numbers[:, : x.shape[-1]].T
    return product.astype(x.dtype)


def halves(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The integers of 4 bits of uint8 [..., bytes], one to a byte: [..., 2 * bytes]."""
    found: npt.NDArray[np.uint8] = _PAIRS[packed].view(np.uint8)
    return found


def _swapped(packed: np.ndarray) -> np.ndarray:
    """Runs and their words in each other's place: there and back."""
    chunks = packed.reshape(len(packed), -1, *_ORDER)
    return np.ascontiguousarray(chunks.transpose(0, 1, 3, 2, 4)).reshape(packed.shape)

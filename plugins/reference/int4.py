"""Products with weights of 4 bits, and the order in which kernels read them."""

import numpy as np
import numpy.typing as npt

CHUNK = 128  # inputs of an output that lie together, in four runs of 32
BLOCKS = (32, 64, 128)  # inputs that share a scale
_AT_ONCE = 4  # scales, and zero points, that a kernel reads together
_PAIRS = np.array([byte & 15 | byte >> 4 << 8 for byte in range(256)], "<u2")  # a byte's two integers, a byte each
_MIDDLE = 8  # the zero point of weights without zero points


def padded_inner(inner: int) -> int:
    """Inputs that are held of each output: whole chunks."""
    return -(-inner // CHUNK) * CHUNK


def scales_of_output(inner: int, block: int) -> int:
    """Scales, and zero points, that are held of each output."""
    return -(-padded_inner(inner) // block // _AT_ONCE) * _AT_ONCE


def in_tiles(integers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return uint8 [width, inner / 2] of integers [width, inner], one to a byte, in the order of int4_product.

    A word is eight inputs of which the even ones are the lower four integers. The first word of each run of 32 comes
    first, then the second of each: so the four threads that share an output in a tensor core's tile read 16 bytes each
    and are always at the same run. ``inner`` is a multiple of 128.
    """
    words = integers.reshape(len(integers), -1, 4, 4, 4, 2)  # chunk, run, word, pair, input
    ordered = words.transpose(0, 1, 3, 2, 5, 4).reshape(len(integers), -1, 2)
    packed: npt.NDArray[np.uint8] = ordered[:, :, 0] | ordered[:, :, 1] << np.uint8(4)
    return packed


def int4_product(
    x: np.ndarray, weight: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None = None, *, block: int
) -> np.ndarray:
    """Return x @ w.T, rounded to the dtype of ``x`` [..., inner] once, for w = (integer - zero point) * scale.

    ``weight`` uint8 [width, padded / 2] are the integers as in_tiles has them, padded behind ``inner`` to a multiple
    of 128. ``scales``, in the dtype of ``x``, are those of ``block`` inputs each (32, 64 or 128), [width, blocks] with
    as many as scales_of_output says. ``zeros`` uint8 [width, blocks / 2] are two to a byte, the first in its low half;
    without them all are 8.
    """
    width, blocks = len(scales), weight.shape[1] * 2 // block
    words = halves(weight).reshape(width, -1, 4, 4, 2, 4).transpose(0, 1, 3, 2, 5, 4)
    integers = words.reshape(width, blocks, block).astype(np.float64)
    middles = np.float64(_MIDDLE) if zeros is None else halves(zeros)[:, :blocks, None].astype(np.float64)
    numbers = ((integers - middles) * scales.astype(np.float64)[:, :blocks, None]).reshape(width, -1)
    product: np.ndarray = x.astype(np.float64) @ numbers[:, : x.shape[-1]].T
    return product.astype(x.dtype)


def halves(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The integers of 4 bits of uint8 [..., bytes], one to a byte: [..., 2 * bytes]."""
    found: npt.NDArray[np.uint8] = _PAIRS[packed].view(np.uint8)
    return found

"""Layout of weights of GGUF's types K on a GPU: what they store, and the order of their inputs.

A value of Q4_K is integer * scale * factor - minimum * factor of the minima, with a scale and a minimum per 32 inputs.
A value of Q6_K is (integer - 128) * scale * factor, with a scale per 16 inputs. Scales and minima are int8, factors
float16, one or two per 256 inputs.
Source of the types: ggml-common.h of llama.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.int4_layout import CHUNK, from_tiles, in_tiles
from tandemrt.plugins.operators.int8_layout import bytes_from_tiles, bytes_in_tiles

BLOCK = 256  # inputs that share a factor
_SCALES = 8  # of a chunk of an output: four and four minima, or eight


@dataclass(frozen=True)
class KQuant:
    """A type: the ``bits`` in which an integer is stored, and the inputs of a ``group``, which share a scale.

    ``minima``: whether each group has a minimum, too; else the middle integer is zero.
    """

    bits: int
    group: int
    minima: bool

    def scales_of_output(self, inner: int) -> int:
        """Return how many scales and minima are stored for an output."""
        return inner // CHUNK * _SCALES

    def factors_of_output(self, inner: int) -> int:
        """Return how many factors are stored for an output."""
        return inner // BLOCK * (2 if self.minima else 1)

    def stored_integers(self, integers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return ``integers`` uint8 [width, inner], one per byte, in the order of the kernels."""
        return in_tiles(integers) if self.bits == 4 else bytes_in_tiles(_by_turns(integers, (2, 4)))

    def integers(self, stored: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """Return the integers of ``stored_integers`` in the order of the inputs: uint8 [width, inner]."""
        return from_tiles(stored) if self.bits == 4 else _by_turns(bytes_from_tiles(stored), (4, 2))


K_QUANTS: Mapping[str, KQuant] = {"q4_k": KQuant(4, 32, minima=True), "q6_k": KQuant(8, 16, minima=False)}


def _by_turns(integers: npt.NDArray[np.uint8], parts: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return each 32 of ``integers``, as ``parts`` of runs of 4, with the two axes of runs exchanged.

    A thread's eight inputs then are four of each half of 32, as tensor core instructions for groups of 16 need them.
    """
    runs = integers.reshape(len(integers), -1, *parts, 4).swapaxes(2, 3)
    return np.ascontiguousarray(runs).reshape(integers.shape)

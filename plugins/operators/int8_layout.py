"""Layout of an 8-bit weight of ``int8_matmul``: order of the integers.

Padding and number of scales are those of 4-bit weights (plugins/operators/int4_layout.py).
"""

import numpy as np
import numpy.typing as npt

ORDER = (2, 2, 4, 8)  # a chunk of 128 inputs: half, run of 32, thread, inputs
STORED = (0, 1, 2, 4, 3, 5)  # a thread's inputs of both runs come together; output and chunk first


def bytes_in_tiles(integers: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return ``integers`` uint8 [width, inner], one per byte, in the order of int8_matmul.

    ``inner`` is a multiple of 128. The four threads that share an output in a tensor core's tile read 16 bytes each,
    twice per chunk, and always work on the same run of 32.
    """
    ordered = integers.reshape(len(integers), -1, *ORDER).transpose(STORED)
    return np.ascontiguousarray(ordered).reshape(integers.shape)


def bytes_from_tiles(packed: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the integers of ``bytes_in_tiles`` in the order of the inputs: uint8 [width, inner]."""
    half, run, thread, inputs = ORDER
    ordered = packed.reshape(len(packed), -1, half, thread, run, inputs).transpose(STORED)
    return ordered.reshape(packed.shape)

"""4-bit floats (e2m1) of ``float4_matmul``: their values and how many share a scale.

Their order and padding are those of 4-bit integers (plugins/operators/int4_layout.py).
"""

import numpy as np

_MAGNITUDES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
VALUES = np.array([*_MAGNITUDES, *(-each for each in _MAGNITUDES)], np.float32)  # by code; the highest bit is the sign
GROUP_SIZES = (16, 32)  # inputs that share a scale: NVFP4, MXFP4

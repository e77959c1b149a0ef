"""Constants of float8_e4m3fn that every implementation of a float8 operator shares."""

import ml_dtypes
import numpy as np

FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
FLOAT8_MAX = 448.0  # largest finite value of float8_e4m3fn
MIN_SCALE = 2.0**-100  # replaces the scale of a token whose values are all zero

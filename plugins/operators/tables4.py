"""Tables of 16 integers of 8 bits that weights of 4 bits choose among; 128 is the zero point.

``iq4`` is that of GGUF's types IQ4, ``mxfp4`` has twice the 4-bit floats.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tandemrt.plugins.operators.float4 import VALUES

_IQ4 = (1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241)
TABLES: Mapping[str, npt.NDArray[np.uint8]] = {
    "iq4": np.array(_IQ4, np.uint8),
    "mxfp4": (128 + 2 * VALUES).astype(np.uint8),
}

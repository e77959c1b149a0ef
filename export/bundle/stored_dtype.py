"""The dtype that the weights of a bundle's model are stored in, from the headers of its safetensors files."""

import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.checkpoint import read_header

_LOW_BIT = re.compile(r"\.(int[4568]|float4|q[46]_k|iq4|mxfp4)\.\w+$")  # packed_tensor_name


def stored_dtype(files: Iterable[Path]) -> str:
    """Return the dtype of most bytes of the matmuls in ``files``; "?" if there are none or a file is damaged."""
    counts = Counter[str]()
    with suppress(BadCheckpoint):
        for tensor in (tensor for file in files for tensor in read_header(file).values()):
            low_bit = _LOW_BIT.search(tensor.name)
            if len(tensor.shape) > 1 and not tensor.name.endswith("embed_tokens.weight"):
                counts[low_bit[1] if low_bit else tensor.dtype] += tensor.nbytes
        return counts.most_common(1)[0][0] if counts else "?"
    return "?"

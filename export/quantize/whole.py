"""Weights that a checkpoint holds in few bits, as the numbers that they stand for."""

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from tandemrt.engines.errors import BadCheckpoint, quoted
from tandemrt.export.quantize.stored import read_blocks, read_matrix, shape_of
from tandemrt.export.quantize.writer import Entry
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.quantization.scheme import Scheme


def whole(name: str, module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme, dtype: str) -> Entry:
    """The weight of ``module`` as the tensor ``name`` in ``dtype``. Raises BadCheckpoint for one that is not there."""
    if scheme.packed:
        shape = shape_of(module, tensors, scheme)
    else:
        weight = tensors.get(f"{module}.weight")
        if weight is None or len(weight.shape) != 2:
            raise BadCheckpoint(f"tensor {quoted(f'{module}.weight')} should be a matrix by its quantization_config")
        shape = weight.shape[0], weight.shape[1]

    def data() -> Iterator[bytes]:
        found = read_blocks(module, tensors, scheme).restored if scheme.packed else read_matrix(module, tensors, scheme)
        yield found.astype(np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)).tobytes()

    return Entry(name, dtype, shape, data)

"""Write quantized weights of a checkpoint as unquantized tensors."""

from collections.abc import Iterator, Mapping

import ml_dtypes
import numpy as np

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.quantize.stored_weights import read_low_bit, read_matrix, shape_of
from tandemrt.export.quantize.writer import Entry
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.quantization.scheme import Scheme


def dequantized_entry(name: str, module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme, dtype: str) -> Entry:
    """Return the dequantized weight of ``module`` as a tensor ``name`` in ``dtype``, computed when it is written.

    Raises BadCheckpoint if the weight is missing or not a matrix.
    """
    if scheme.packed:
        shape = shape_of(module, tensors, scheme)
    else:
        weight = tensors.get(f"{module}.weight")
        if weight is None or len(weight.shape) != 2:
            raise BadCheckpoint(f"tensor {quoted(f'{module}.weight')} should be a matrix by its quantization_config")
        shape = weight.shape[0], weight.shape[1]

    def data() -> Iterator[bytes]:
        found = (
            read_low_bit(module, tensors, scheme).dequantized if scheme.packed else read_matrix(module, tensors, scheme)
        )
        yield found.astype(np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)).tobytes()

    return Entry(name, dtype, shape, data)

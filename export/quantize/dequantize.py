"""Write quantized weights of a checkpoint as unquantized tensors."""

from collections.abc import Iterator, Mapping

from tandemrt.export.graph.low_bit_format import numpy_dtype
from tandemrt.export.quantize.stored_weights import read_matrix, shape_of
from tandemrt.export.quantize.writer import Entry
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.quantization.scheme import Scheme


def dequantized_entry(
    name: str,
    module: str,
    tensors: Mapping[str, StoredTensor],
    scheme: Scheme,
    dtype: str,
    *,
    transposed: bool = False,
) -> Entry:
    """Return the dequantized weight of ``module`` as a tensor ``name`` in ``dtype``, computed when it is written.

    ``transposed``: write [inputs, outputs]. Raises BadCheckpoint if the weight is missing or not a matrix.
    """
    shape = shape_of(module, tensors, scheme)

    def data() -> Iterator[bytes]:
        matrix = read_matrix(module, tensors, scheme)
        yield (matrix.T if transposed else matrix).astype(numpy_dtype(dtype)).tobytes()

    return Entry(name, dtype, shape[::-1] if transposed else shape, data)

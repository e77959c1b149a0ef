"""Write the float8 weights of experts in the order of the operator float8_experts, with equal values."""

from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import numpy.typing as npt

from tandemrt.engines.recipe.backends import CPU
from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.graph.low_bit_format import LowBitFormat, packed_tensor_name
from tandemrt.export.quantize.groups import wide
from tandemrt.export.quantize.matmuls import groups, place_on_gpu
from tandemrt.export.quantize.stored_weights import read_scales, shape_of
from tandemrt.export.quantize.writer import Entry
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.values import read_values
from tandemrt.plugins.operators.int4_layout import CHUNK, padded_inner
from tandemrt.plugins.operators.int8_layout import bytes_in_tiles

_FORM = LowBitFormat(8, CHUNK, tiles="bfloat16", floats=True)  # scales are float32 for any dtype
_NOT_A_NUMBER = 0x7F  # of float8_e4m3fn, without the sign


def expert_entries(checkpoint: Checkpoint, schemes: Mapping[str, Scheme]) -> Iterator[Entry]:
    """Yield the tensors of the weights of modules: the numbers of some adjacent weights, then their scales.

    Raises BadCheckpoint for scales of other groups than whole multiples of 128 inputs, which the operator has, and for
    weights that contradict their scheme.
    """
    tensors = checkpoint.tensors
    for group in groups(sorted(schemes, key=place_on_gpu), lambda module: module, lambda _: None, on_gpu=True):
        for kind, make in ((f"tiles{CHUNK}", _numbers), ("scales", _scales)):
            for module in group:
                scheme = schemes[module]
                if scheme.group_shape[1] % CHUNK:
                    raise BadCheckpoint(
                        f"{module}: experts in float8 on a GPU need scales for multiples of {CHUNK} inputs or all; "
                        f"these are for {scheme.group_shape[1]}; choose backend.name {CPU!r} or dequantize = "
                        "true"
                    )
                shapes = _FORM.shapes(*shape_of(module, tensors, scheme))
                name = packed_tensor_name(f"{module}.weight", _FORM.numbers, kind)
                yield Entry(name, *shapes[kind], partial(make, checkpoint, module, scheme))


def _numbers(checkpoint: Checkpoint, module: str, scheme: Scheme) -> Iterator[bytes]:
    _, inner = shape_of(module, checkpoint.tensors, scheme)
    stored = checkpoint.tensors[f"{module}.weight"]
    numbers: npt.NDArray[np.uint8] = read_values(stored).view(np.uint8)
    if stored.transposed:
        numbers = np.ascontiguousarray(numbers.T)
    if (numbers & _NOT_A_NUMBER == _NOT_A_NUMBER).any():
        raise BadCheckpoint(
            f"{stored.file}: tensor {quoted(stored.name)} should hold numbers; some are not a number; download the "
            "checkpoint again"
        )
    yield bytes_in_tiles(wide(numbers, padded_inner(inner))).tobytes()


def _scales(checkpoint: Checkpoint, module: str, scheme: Scheme) -> Iterator[bytes]:
    rows, inner = shape_of(module, checkpoint.tensors, scheme)
    tall, across = scheme.group_shape
    scales = read_scales(module, checkpoint.tensors, scheme, rows, inner).repeat(tall or rows, axis=0)[:rows]
    chunks = padded_inner(inner) // CHUNK
    yield scales.repeat(across // CHUNK or chunks, axis=1)[:, :chunks].astype(np.float32).tobytes()

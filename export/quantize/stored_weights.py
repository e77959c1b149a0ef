"""Read quantized weights of a checkpoint: 4 bits (compressed-tensors, GPTQ, AWQ, MXFP4) and float8.

Source of the layouts: the code that writes them, compressed_tensors/compressors/pack_quantized, GPTQModel's
nn_modules/qlinear (``pack_block``), AutoAWQ's awq/modules/linear/gemm.py (``from_linear``).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.quantize.groups import QuantizedMatrix
from tandemrt.export.quantize.mxfp4 import FORM, read_mxfp4
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.quantization.mxfp4 import GROUP_SIZE as MXFP4_GROUP
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.values import read_values, require_scales
from tandemrt.plugins.operators.int4_layout import unpacked

_PER_WORD = 8  # integers of 4 bits in an int32, the first one in its lowest bits
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, that the i-th integer of a word holds
_FLOATS = ("float32", "float16", "bfloat16")
PACKED = {
    "compressed-tensors": "weight_packed",
    "gptq": "qweight",
    "gptq_v2": "qweight",
    "awq": "qweight",
    "mxfp4": "blocks",
}


def tensor_names(module: str, scheme: Scheme) -> tuple[str, ...]:
    """Return the names of the tensors that store the weight of ``module``; some of them are optional."""
    if scheme.weight == "float8_e4m3fn":
        kinds: tuple[str, ...] = ("weight", scheme.scale, scheme.input_scale)
    elif scheme.weight == "mxfp4":
        kinds = ("blocks", "scales")
    elif scheme.layout == "compressed-tensors":
        kinds = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point")
    else:
        kinds = ("qweight", "scales", "qzeros", "g_idx")
    return tuple(f"{module}.{kind}" for kind in kinds)


def packed_format(scheme: Scheme) -> LowBitFormat:
    """Return the format in which a build writes a weight stored in 4 bits."""
    return FORM if scheme.weight == "mxfp4" else LowBitFormat(4, scheme.group_shape[1], not scheme.symmetric)


def shape_of(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> tuple[int, int]:
    """Return the outputs and inputs of the weight of ``module``. Raises BadCheckpoint for a malformed tensor."""
    tensor = _find(tensors, f"{module}.{PACKED[scheme.layout]}")
    if scheme.weight == "mxfp4":
        rows, groups, _ = (*tensor.shape, 0, 0, 0)[:3]  # the next line rejects tensors of another rank
        _typed(tensors, tensor.name, (rows, groups, MXFP4_GROUP // 2), ("uint8",))
        return rows, groups * MXFP4_GROUP
    if len(tensor.shape) != 2 or tensor.dtype != "int32":
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should be a matrix of int32, it is "
            f"{tensor.dtype}{list(tensor.shape)}"
        )
    one, two = tensor.shape
    if scheme.layout == "compressed-tensors":
        return one, two * _PER_WORD
    return (two * _PER_WORD, one) if scheme.layout == "awq" else (two, one * _PER_WORD)


def read_low_bit(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> QuantizedMatrix:
    """Read the weight of ``module``, stored in 4 bits. Raises BadCheckpoint, by name, for tensors that do not fit."""
    (rows, inner), group = shape_of(module, tensors, scheme), scheme.group_shape[1]
    if scheme.weight == "mxfp4":
        exponents = _typed(tensors, f"{module}.scales", (rows, inner // group), ("uint8",))
        return read_mxfp4(_find(tensors, f"{module}.blocks"), exponents)
    if inner % group or (rows % _PER_WORD and not scheme.symmetric):
        raise BadCheckpoint(
            f"{module}: a weight of 4 bits should have inputs that are a multiple of its group size, {group}, and with "
            f"zero points outputs that are a multiple of {_PER_WORD}; it has {rows} outputs and {inner} inputs"
        )
    read = _compressed_tensors if scheme.layout == "compressed-tensors" else _gptq_or_awq
    integers, scales, zeros = read(module, tensors, scheme, rows, inner)
    if zeros is not None and scheme.symmetric:
        if (zeros != 8).any():
            raise BadCheckpoint(
                f"{module}: qzeros should all be 8 where sym is true, but {zeros[zeros != 8][0]} is one"
            )
        zeros = None
    blocks = np.ascontiguousarray(integers).reshape(rows, -1, group)
    return QuantizedMatrix(
        LowBitFormat(4, group, zeros is not None), inner, blocks, np.ascontiguousarray(scales), zeros
    )


def read_matrix(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme | None) -> npt.NDArray[np.float32]:
    """Read the weight of ``module``, stored as floats or in float8_e4m3fn, as float32 [outputs, inputs].

    Raises BadCheckpoint for scales of another shape or dtype than ``scheme`` implies.
    """
    weight = _find(tensors, f"{module}.weight")
    matrix = read_values(weight).astype(np.float32)
    if weight.transposed:
        matrix = np.ascontiguousarray(matrix.T)
    if scheme is None:
        return matrix
    rows, inner = matrix.shape
    tensor = _find(tensors, f"{module}.{scheme.scale}")
    counts = scheme.scales(rows, inner)
    flat = {counts, counts[:1]} if counts[1] == 1 else {counts}
    if tensor.shape not in flat | ({()} if counts == (1, 1) else set()) or tensor.dtype not in _FLOATS:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should be {' or '.join(_FLOATS)}{list(counts)} by its "
            f"quantization_config, it is {tensor.dtype}{list(tensor.shape)}"
        )
    require_scales(tensor)
    scales = read_values(tensor).astype(np.float32).reshape(counts)
    tall, wide = (size or full for size, full in zip(scheme.group_shape, (rows, inner), strict=True))
    return matrix * scales.repeat(tall, axis=0)[:rows].repeat(wide, axis=1)[:, :inner]


_Parts = tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.uint8] | None]


def _compressed_tensors(
    module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme, rows: int, inner: int
) -> _Parts:
    groups = inner // scheme.group_shape[1]
    shape = read_values(_typed(tensors, f"{module}.weight_shape", (2,), ("int64", "int32")))
    if tuple(shape) != (rows, inner):
        raise BadCheckpoint(
            f"{module}: weight_shape should be {[rows, inner]}, as weight_packed has it, it is {shape.tolist()}"
        )
    packed = _typed(tensors, f"{module}.weight_packed", (rows, inner // _PER_WORD))
    scales = _scales(tensors, f"{module}.weight_scale", (rows, groups))
    if scheme.symmetric:
        return _unpacked(read_values(packed)), scales, None
    zeros = _typed(tensors, f"{module}.weight_zero_point", (rows // _PER_WORD, groups))
    return _unpacked(read_values(packed)), scales, np.ascontiguousarray(_unpacked(read_values(zeros).T).T)


def _gptq_or_awq(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme, rows: int, inner: int) -> _Parts:
    group, awq = scheme.group_shape[1], scheme.layout == "awq"
    groups = inner // group
    packed = (inner, rows // _PER_WORD) if awq else (inner // _PER_WORD, rows)
    words = read_values(_typed(tensors, f"{module}.qweight", packed))
    scales = _scales(tensors, f"{module}.scales", (groups, rows)).T
    integers = _unpacked(words) if awq else _unpacked(words.T).T
    zeros = None
    if not awq or not scheme.symmetric:
        zeros = _unpacked(read_values(_typed(tensors, f"{module}.qzeros", (groups, rows // _PER_WORD))))
    if awq:
        integers, zeros = _in_order(integers), None if zeros is None else _in_order(zeros)
    elif scheme.layout == "gptq" and zeros is not None:
        zeros = (zeros + np.uint8(1)) & np.uint8(15)  # version 1 stores zero points minus 1
    if f"{module}.g_idx" in tensors:
        _require_order(module, tensors, inner, group)
    return integers.T, scales, None if zeros is None else np.ascontiguousarray(zeros.T)


def _unpacked(words: npt.NDArray) -> npt.NDArray[np.uint8]:
    """Unpack int32 [rows, words] to 4-bit integers, uint8 [rows, words * 8]."""
    return unpacked(np.ascontiguousarray(words, dtype="<i4").view(np.uint8))


def _in_order(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return values.reshape(len(values), -1, _PER_WORD)[:, :, np.argsort(_AWQ_ORDER)].reshape(len(values), -1)


def _require_order(module: str, tensors: Mapping[str, StoredTensor], inner: int, group: int) -> None:
    found = read_values(_typed(tensors, f"{module}.g_idx", (inner,)))
    wrong = np.flatnonzero(found != np.arange(inner) // group)
    if wrong.size:
        raise BadCheckpoint(
            f"{module}: g_idx should give the inputs to groups of {group} in their order, but input {wrong[0]} is in "
            f"group {found[wrong[0]]}; quantize the model with desc_act = false"
        )


def _scales(tensors: Mapping[str, StoredTensor], name: str, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    tensor = _typed(tensors, name, shape, _FLOATS)
    require_scales(tensor)
    return read_values(tensor).astype(np.float32)


def _typed(
    tensors: Mapping[str, StoredTensor], name: str, shape: tuple[int, ...], dtypes: Sequence[str] = ("int32",)
) -> StoredTensor:
    tensor = _find(tensors, name)
    if tensor.shape != shape or tensor.dtype not in dtypes:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(name)} should be {' or '.join(dtypes)}{list(shape)} by its "
            f"quantization_config, it is {tensor.dtype}{list(tensor.shape)}"
        )
    return tensor


def _find(tensors: Mapping[str, StoredTensor], name: str) -> StoredTensor:
    if name not in tensors:
        raise BadCheckpoint(f"tensor {quoted(name)} is missing, but its quantization_config requires it")
    return tensors[name]

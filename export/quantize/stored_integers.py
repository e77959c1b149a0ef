"""Read weights of 4 or 8 bits: compressed-tensors, GPTQ, AWQ, and one signed byte per value.

Source of the layouts: the code that writes them, compressed_tensors/compressors/pack_quantized, GPTQModel's
nn_modules/qlinear (``pack_block``), AutoAWQ's awq/modules/linear/gemm.py and gemv.py (``from_linear``).
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, quoted
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.quantize.groups import QuantizedMatrix
from tandemrt.export.quantize.typed_tensors import find, scales_of, typed
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.quantization.scheme import BITS, FULL_DIM, Scheme
from tandemrt.export.read.values import read_values
from tandemrt.plugins.operators.int4_layout import unpacked

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column, of eight, that the i-th integer of a word holds
_WIDE_GROUP, _NARROW_GROUP = 128, 32  # in which a scale per output is repeated
_BYTES = ("integers", "bitsandbytes")  # layouts with one signed byte per value
_Parts = tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.uint8] | None]


def integer_shape(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> tuple[int, int]:
    """Return the outputs and inputs of the weight of ``module``. Raises BadCheckpoint for a malformed tensor."""
    tensor, dtype = find(tensors, f"{module}.{_weight(scheme)}"), "int8" if scheme.layout in _BYTES else "int32"
    if len(tensor.shape) != 2 or tensor.dtype != dtype:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should be a matrix of {dtype}, it is "
            f"{tensor.dtype}{list(tensor.shape)}"
        )
    (one, two), per_word = tensor.shape, 32 // BITS[scheme.weight]
    if scheme.layout in _BYTES:
        return one, two
    if scheme.layout in ("compressed-tensors", "awq_gemv"):
        return one, two * per_word
    return (two * per_word, one) if scheme.layout == "awq" else (two, one * per_word)


def integer_format(scheme: Scheme, inner: int) -> LowBitFormat:
    """Return the format in which a build writes a weight with ``inner`` inputs."""
    group = scheme.group_shape[1]
    if group == FULL_DIM:
        group = _NARROW_GROUP if inner % _WIDE_GROUP else _WIDE_GROUP
    return LowBitFormat(BITS[scheme.weight], group, not scheme.symmetric)


def read_integers(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> QuantizedMatrix:
    """Read the weight of ``module``, whose inputs are in groups in their order.

    Raises BadCheckpoint, by name, for tensors that do not fit, and for inputs in another order.
    """
    rows, inner = integer_shape(module, tensors, scheme)
    _require_order(module, _groups_of_inputs(module, tensors, scheme, inner), scheme.group_shape[1] or inner)
    form, per_word = integer_format(scheme, inner), 32 // BITS[scheme.weight]
    if inner % form.group_size or (rows % per_word and not scheme.symmetric):
        raise BadCheckpoint(
            f"{module}: a weight of {form.bits} bits should have inputs that are a multiple of its group size, "
            f"{form.group_size}, and with zero points outputs that are a multiple of {per_word}; it has {rows} outputs "
            f"and {inner} inputs"
        )
    integers, scales, zeros = _parts(module, tensors, scheme, rows, inner)
    groups = inner // form.group_size
    blocks = np.ascontiguousarray(integers).reshape(rows, groups, form.group_size)
    return QuantizedMatrix(
        form, inner, blocks, _repeated(scales, groups), None if zeros is None else _repeated(zeros, groups)
    )


def read_reordered(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> npt.NDArray[np.float32]:
    """Read the weight of ``module`` as float32 [outputs, inputs]; each input may be in any group."""
    rows, inner = integer_shape(module, tensors, scheme)
    group = _groups_of_inputs(module, tensors, scheme, inner)
    count = scheme.scales(rows, inner)[1]
    if group.size != inner or group.min() < 0 or group.max() >= count:
        raise BadCheckpoint(f"{module}: g_idx should name groups 0 to {count - 1} for {inner} inputs")
    integers, scales, zeros = _parts(module, tensors, scheme, rows, inner)
    middle = np.float32(1 << (BITS[scheme.weight] - 1))
    shifted = integers.astype(np.float32) - (middle if zeros is None else zeros[:, group])
    weight: npt.NDArray[np.float32] = shifted * scales[:, group]
    return weight


def _parts(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme, rows: int, inner: int) -> _Parts:
    """Return unsigned integers [rows, inner], and scales and zero points [rows, groups]; None: the middle."""
    readers = {
        "compressed-tensors": _compressed_tensors,
        "integers": _bytes,
        "bitsandbytes": _bytes,
        "awq_gemv": _awq_gemv,
    }
    integers, scales, zeros = readers.get(scheme.layout, _gptq_or_awq)(module, tensors, scheme, rows, inner)
    if zeros is not None and scheme.symmetric:
        middle = 1 << (BITS[scheme.weight] - 1)
        if (zeros != middle).any():
            raise BadCheckpoint(
                f"{module}: qzeros should all be {middle} where sym is true, but {zeros[zeros != middle][0]} is one"
            )
        zeros = None
    return integers, scales, zeros


def _weight(scheme: Scheme) -> str:
    return (
        "weight" if scheme.layout in _BYTES else "weight_packed" if scheme.layout == "compressed-tensors" else "qweight"
    )


def _compressed_tensors(
    module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme, rows: int, inner: int
) -> _Parts:
    bits, counts = BITS[scheme.weight], scheme.scales(rows, inner)
    if (name := f"{module}.weight_shape") in tensors:  # parts of a fused tensor have none
        shape = read_values(typed(tensors, name, (2,), ("int64", "int32")))
        if tuple(shape) != (rows, inner):
            raise BadCheckpoint(
                f"{module}: weight_shape should be {[rows, inner]}, as weight_packed has it, it is {shape.tolist()}"
            )
    packed = typed(tensors, f"{module}.weight_packed", (rows, inner * bits // 32))
    scales = scales_of(tensors, f"{module}.weight_scale", counts)
    if scheme.symmetric:
        return _unpacked(read_values(packed), bits), scales, None
    zeros = typed(tensors, f"{module}.weight_zero_point", (rows * bits // 32, counts[1]))
    return _unpacked(read_values(packed), bits), scales, _unpacked(read_values(zeros).T, bits).T


def _bytes(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme, rows: int, inner: int) -> _Parts:
    _reject_input_factors(module, tensors)
    counts = scheme.scales(rows, inner)
    shapes = [(1,), ()] if counts == (1, 1) else [(rows,)] if counts[1] == 1 else []
    if scheme.layout == "bitsandbytes":  # SCB is the largest value of an output
        _require_rows(module, tensors)
        scales = scales_of(tensors, f"{module}.SCB", counts, *shapes) / np.float32(127)
    else:
        scales = scales_of(tensors, f"{module}.weight_scale", counts, *shapes)
        _require_no_zero_points(module, tensors, rows)
    signed = read_values(typed(tensors, f"{module}.weight", (rows, inner), ("int8",)))
    return signed.view(np.uint8) ^ np.uint8(128), np.broadcast_to(scales, (rows, counts[1])), None


def _require_no_zero_points(module: str, tensors: Mapping[str, StoredTensor], rows: int) -> None:
    """Raise BadCheckpoint for zero points other than 0, which torchao stores too."""
    name = f"{module}.weight_zero_point"
    if name in tensors and read_values(typed(tensors, name, (rows, 1), ("int8",))).any():
        raise BadCheckpoint(f"{tensors[name].file}: tensor {quoted(name)} should hold zeros: scales are symmetric")


def _require_rows(module: str, tensors: Mapping[str, StoredTensor]) -> None:
    """Raise BadCheckpoint for int8 weights that bitsandbytes stored in the order of one GPU's matmuls."""
    name = f"{module}.weight_format"
    if name in tensors and (layout := read_values(typed(tensors, name, (), ("uint8",)))):
        raise BadCheckpoint(
            f"{tensors[name].file}: tensor {quoted(name)} should be 0, rows, it is {layout}; save the model again with "
            "bitsandbytes 0.45 or later"
        )


def _gptq_or_awq(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme, rows: int, inner: int) -> _Parts:
    awq, bits = scheme.layout == "awq", BITS[scheme.weight]
    groups, per_word = scheme.scales(rows, inner)[1], 32 // bits
    packed = (inner, rows // per_word) if awq else (inner // per_word, rows)
    words = read_values(typed(tensors, f"{module}.qweight", packed))
    scales = scales_of(tensors, f"{module}.scales", (groups, rows)).T
    integers = _unpacked(words, bits) if awq else _unpacked(words.T, bits).T
    zeros = None
    if not awq or not scheme.symmetric:
        zeros = _unpacked(read_values(typed(tensors, f"{module}.qzeros", (groups, rows // per_word))), bits)
    if awq:
        integers, zeros = _in_order(integers), None if zeros is None else _in_order(zeros)
    elif scheme.layout == "gptq" and zeros is not None:
        zeros = (zeros + np.uint8(1)) & np.uint8((1 << bits) - 1)  # version 1 stores zero points minus 1
    return integers.T, scales, None if zeros is None else zeros.T


def _awq_gemv(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme, rows: int, inner: int) -> _Parts:
    """Read words in the order of the inputs; scales and zero points of an output are padded."""
    bits, groups = BITS[scheme.weight], scheme.scales(rows, inner)[1]
    words = _awq_gemv_words(inner, inner // groups)
    integers = _unpacked(read_values(typed(tensors, f"{module}.qweight", (rows, inner * bits // 32))), bits)
    padded = scales_of(tensors, f"{module}.scales", (rows, words * 32 // bits), used=groups)
    if scheme.symmetric:
        return integers, padded, None
    zeros = _unpacked(read_values(typed(tensors, f"{module}.qzeros", (rows, words))), bits)
    return integers, padded, zeros[:, :groups]


def _awq_gemv_words(inner: int, group: int) -> int:
    """Return the words of zero points per output: AutoAWQ's ``calculate_zeros_width``."""
    multiple = {128: 1, 64: 2, 32: 4}.get(group, 1)
    words = -(-(inner // group) // 8)
    return -(-words // multiple) * multiple


def _unpacked(words: npt.NDArray, bits: int) -> npt.NDArray[np.uint8]:
    """Unpack int32 [rows, words] to integers of ``bits``, the first in the lowest bits: uint8 [rows, words * n]."""
    octets = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    return unpacked(octets) if bits == 4 else octets


def _in_order(values: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return values.reshape(len(values), -1, 8)[:, :, np.argsort(_AWQ_ORDER)].reshape(len(values), -1)


def _repeated(values: npt.NDArray, groups: int) -> npt.NDArray:
    """Repeat values per output [rows, 1] for every group; values [rows, groups] stay as they are."""
    return np.ascontiguousarray(np.broadcast_to(values, (len(values), groups)))


def _groups_of_inputs(
    module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme, inner: int
) -> npt.NDArray[np.integer]:
    """Return the group of each input, [inner]."""
    name = f"{module}.{'weight_g_idx' if scheme.layout == 'compressed-tensors' else 'g_idx'}"
    if name not in tensors:
        return np.arange(inner) // (scheme.group_shape[1] or inner)
    return read_values(typed(tensors, name, (inner,)))


def _require_order(module: str, ids: npt.NDArray[np.integer], group: int) -> None:
    wrong = np.flatnonzero(ids != np.arange(len(ids)) // group)
    if wrong.size:
        raise BadCheckpoint(
            f"{module}: g_idx should give the inputs to groups of {group} in their order, but input {wrong[0]} is in "
            f"group {ids[wrong[0]]}; write dequantize = true in the recipe's section of this checkpoint, or quantize "
            "the model with desc_act = false"
        )


def _reject_input_factors(module: str, tensors: Mapping[str, StoredTensor]) -> None:
    if f"{module}.pre_quant_scale" in tensors:
        raise BadCheckpoint(
            f"{module}: pre_quant_scale multiplies inputs, which the exporter does not implement; choose a checkpoint "
            "without it"
        )

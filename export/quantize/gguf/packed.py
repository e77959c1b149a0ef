"""Weights of GGUF files that stay packed: integers with the scales and offsets that their type defines.

A row is a run of GGUF's blocks, of 32 or 256 inputs each. A value is integer * scale + offset, or (integer - middle of
the range) * scale. Types K have two levels: a block has a scale, and its groups have integers that multiply it.
Types IQ4 and MXFP4 choose among the 16 integers of a table (plugins/operators/tables4.py).
Source of the layouts: ggml-common.h and ggml-quants.c of llama.cpp.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.quantize.float4 import Float4Matrix, mxfp4_matrix
from tandemrt.export.quantize.groups import QuantizedMatrix
from tandemrt.export.quantize.typed_tensors import find
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.quantization.gguf import gguf_type
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.values import read_values

Bytes = npt.NDArray[np.uint8]
_VALUES_AT_ONCE = 1 << 20  # of a part: threads share a matrix, and numpy spends no time between its calls
_ROWS = 8  # rows of a part are a multiple of this, as outputs of a tile are
# The bits of a byte as the fifth bits of eight integers: one word for each byte.
_FIFTH_BITS = ((np.arange(256)[:, None] >> np.arange(8) & 1) << 4).astype(np.uint8).view(np.uint64)[:, 0]


@dataclass(frozen=True)
class _Values:
    """The values of some blocks [rows, blocks, ...]: integers and scales per input, block and group."""

    integers: Bytes
    scales: npt.NDArray[np.floating]
    offsets: npt.NDArray[np.float16] | None = None
    subscales: npt.NDArray[np.int8] | None = None
    suboffsets: npt.NDArray[np.int8] | None = None


@dataclass(frozen=True)
class _Type:
    """A type: its form, the bytes of a block, the inputs of one, and how to read blocks [rows, blocks, bytes]."""

    form: LowBitFormat
    nbytes: int
    inputs: int
    read: Callable[[Bytes], _Values]


def gguf_form(scheme: Scheme, *, on_gpu: bool) -> LowBitFormat:
    """Return the form in which a build writes a weight. Kernels of a GPU read integers of 4 or 8 bits."""
    form = _TYPES[gguf_type(scheme)].form
    if not on_gpu:
        return form
    if form.groups_per_scale > 1 and not form.offsets:
        return LowBitFormat(8, 16, groups_per_scale=16)
    return replace(form, bits=4 if form.bits == 4 and not form.table else 8, table="")


def gguf_shape(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> tuple[int, int]:
    """Return the outputs and inputs of the weight of ``module``. Raises BadCheckpoint for a malformed tensor."""
    tensor, stored = find(tensors, f"{module}.weight"), _TYPES[gguf_type(scheme)]
    if tensor.dtype != "uint8" or len(tensor.shape) != 2 or tensor.shape[1] % stored.nbytes:
        raise BadCheckpoint(
            f"{tensor.file}: {module}.weight should be rows of {gguf_type(scheme)}, {stored.nbytes} bytes each, it is "
            f"{tensor.dtype}{list(tensor.shape)}"
        )
    return tensor.shape[0], tensor.shape[1] // stored.nbytes * stored.inputs


def gguf_parts(
    module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme
) -> Iterator[Callable[[], QuantizedMatrix]]:
    """Yield functions that read some rows of the weight of ``module``. Raises BadCheckpoint for a malformed tensor."""
    rows, inner = gguf_shape(module, tensors, scheme)
    tensor, stored = find(tensors, f"{module}.weight"), _TYPES[gguf_type(scheme)]
    step = max(_ROWS, _VALUES_AT_ONCE // inner // _ROWS * _ROWS)
    row_bytes = tensor.shape[1]

    def read(begin: int) -> QuantizedMatrix:
        count = min(step, rows - begin)
        data = np.fromfile(tensor.file, np.uint8, count * row_bytes, offset=tensor.offset + begin * row_bytes)
        return _matrix(stored, data.reshape(count, -1, stored.nbytes), inner)

    yield from (partial(read, begin) for begin in range(0, rows, step))


def read_gguf(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> QuantizedMatrix:
    """Read the weight of ``module``. Raises BadCheckpoint for a malformed tensor."""
    parts = [read() for read in gguf_parts(module, tensors, scheme)]
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in ("integers", "scales", "offsets", "subscales", "suboffsets")
        if getattr(parts[0], name) is not None
    }
    return replace(parts[0], **arrays)


def read_gguf_mxfp4(module: str, tensors: Mapping[str, StoredTensor], scheme: Scheme) -> Float4Matrix:
    """Read the weight of ``module``, in MXFP4, as floats. Raises BadCheckpoint for a malformed tensor."""
    rows, _ = gguf_shape(module, tensors, scheme)
    blocks = read_values(find(tensors, f"{module}.weight")).reshape(rows, -1, _TYPES["MXFP4"].nbytes)
    return mxfp4_matrix(_halves(_bytes(blocks, 1, 16)), 2 * _doubled_scales(blocks))


def _matrix(stored: _Type, blocks: Bytes, inner: int) -> QuantizedMatrix:
    values, rows = stored.read(blocks), len(blocks)
    return QuantizedMatrix(
        stored.form,
        inner,
        values.integers.reshape(rows, -1, stored.form.group_size),
        values.scales.astype(np.float32).reshape(rows, -1),
        offsets=None if values.offsets is None else values.offsets.astype(np.float32).reshape(rows, -1),
        subscales=None if values.subscales is None else values.subscales.reshape(rows, -1),
        suboffsets=None if values.suboffsets is None else values.suboffsets.reshape(rows, -1),
    )


def _bytes(blocks: Bytes, at: int, count: int) -> Bytes:
    """Return ``count`` bytes of each block from byte ``at`` on, [rows, blocks, count]; numpy copies a void at once."""
    return blocks[:, :, at : at + count].view(np.dtype((np.void, count))).copy().view(np.uint8)


def _float16(blocks: Bytes, at: int) -> npt.NDArray[np.float16]:
    """Return the float16 numbers at byte ``at`` of the blocks, [rows, blocks]."""
    return _bytes(blocks, at, 2).view("<f2")[:, :, 0]


def _halves(stored: Bytes) -> Bytes:
    """Return the low halves of all bytes of the last axis, then the high halves."""
    run = np.dtype((np.void, stored.shape[-1]))
    return np.concatenate([(stored & 15).view(run), (stored >> 4).view(run)], axis=-1).view(np.uint8)


def _read_4_or_5_bits(bits: int, *, offsets: bool) -> Callable[[Bytes], _Values]:
    """Return the reader of Q4_0, Q4_1, Q5_0 or Q5_1: blocks of 32 inputs with a scale and perhaps an offset."""
    begin = 4 if offsets else 2

    def read(blocks: Bytes) -> _Values:
        integers = _halves(_bytes(blocks, blocks.shape[2] - 16, 16))
        if bits == 5:
            integers |= _FIFTH_BITS.take(_bytes(blocks, begin, 4)).view(np.uint8)
        return _Values(integers, _float16(blocks, 0), _float16(blocks, 2) if offsets else None)

    return read


def _read_q8_0(blocks: Bytes) -> _Values:
    return _Values(_bytes(blocks, 2, 32) ^ np.uint8(128), _float16(blocks, 0))


def _read_q4_k(blocks: Bytes) -> _Values:
    return _two_levels(blocks, _in_eight_groups(_bytes(blocks, 16, 128)))


def _read_q5_k(blocks: Bytes) -> _Values:
    integers = _in_eight_groups(_bytes(blocks, 48, 128))
    upper = _bytes(blocks, 16, 32)[:, :, None] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # a bit for each group
    integers |= upper << 4
    return _two_levels(blocks, integers)


def _in_eight_groups(stored: Bytes) -> Bytes:
    """Return integers [rows, blocks, 8 groups, 32]; 32 bytes hold a group in their low halves, the next in the high."""
    return _halves(stored.reshape(*stored.shape[:2], 4, 32)).reshape(*stored.shape[:2], 8, 32)


def _two_levels(blocks: Bytes, integers: Bytes) -> _Values:
    """Return the values of Q4_K or Q5_K; 12 bytes hold 8 scales and 8 minima of 6 bits."""
    first, second, rest = (_bytes(blocks, at, 4) for at in (4, 8, 12))
    subscales = np.concatenate([first & 63, rest & 15 | first >> 6 << 4], axis=-1)
    suboffsets = np.concatenate([second & 63, rest >> 4 | second >> 6 << 4], axis=-1)
    scales, minima = _float16(blocks, 0), _float16(blocks, 2)
    return _Values(integers, scales, -minima, subscales.view(np.int8), suboffsets.view(np.int8))


def _read_q6_k(blocks: Bytes) -> _Values:
    low = _bytes(blocks, 0, 128).reshape(*blocks.shape[:2], 2, 64)
    upper = _bytes(blocks, 128, 64).reshape(*blocks.shape[:2], 2, 1, 32)
    integers = _halves(low).reshape(*blocks.shape[:2], 2, 4, 32)
    integers |= (upper >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3) << 4
    return _Values(integers, _float16(blocks, 208), subscales=_bytes(blocks, 192, 16).view(np.int8))


def _read_mxfp4(blocks: Bytes) -> _Values:
    return _Values(_halves(_bytes(blocks, 1, 16)), _doubled_scales(blocks))


def _doubled_scales(blocks: Bytes) -> npt.NDArray[np.float32]:
    """Return the scales of doubled floats of MXFP4: powers of 2, whose exponents have a bias of 127."""
    scales: npt.NDArray[np.float32] = np.ldexp(np.float32(1), blocks[:, :, 0].astype(np.int32) - 128)
    return scales


def _read_iq4_nl(blocks: Bytes) -> _Values:
    return _Values(_halves(_bytes(blocks, 2, 16)), _float16(blocks, 0))


def _read_iq4_xs(blocks: Bytes) -> _Values:
    lower = _halves(_bytes(blocks, 4, 4)[..., None]).reshape(*blocks.shape[:2], 8)  # of the scales of eight groups
    upper = _bytes(blocks, 2, 2).view("<u2") >> np.arange(0, 16, 2) & 3
    subscales = (lower | upper << 4).astype(np.int8) - np.int8(32)
    integers = _halves(_bytes(blocks, 8, 128).reshape(*blocks.shape[:2], 8, 16))
    return _Values(integers, _float16(blocks, 0), subscales=subscales)


_TYPES = {
    "Q4_0": _Type(LowBitFormat(4, 32), 18, 32, _read_4_or_5_bits(4, offsets=False)),
    "Q4_1": _Type(LowBitFormat(4, 32, offsets=True), 20, 32, _read_4_or_5_bits(4, offsets=True)),
    "Q5_0": _Type(LowBitFormat(5, 32), 22, 32, _read_4_or_5_bits(5, offsets=False)),
    "Q5_1": _Type(LowBitFormat(5, 32, offsets=True), 24, 32, _read_4_or_5_bits(5, offsets=True)),
    "Q8_0": _Type(LowBitFormat(8, 32), 34, 32, _read_q8_0),
    "Q4_K": _Type(LowBitFormat(4, 32, offsets=True, groups_per_scale=8), 144, 256, _read_q4_k),
    "Q5_K": _Type(LowBitFormat(5, 32, offsets=True, groups_per_scale=8), 176, 256, _read_q5_k),
    "Q6_K": _Type(LowBitFormat(6, 16, groups_per_scale=16), 210, 256, _read_q6_k),
    "IQ4_NL": _Type(LowBitFormat(4, 32, table="iq4"), 18, 32, _read_iq4_nl),
    "MXFP4": _Type(LowBitFormat(4, 32, table="mxfp4"), 17, 32, _read_mxfp4),
    "IQ4_XS": _Type(LowBitFormat(4, 32, groups_per_scale=8, table="iq4"), 136, 256, _read_iq4_xs),
}

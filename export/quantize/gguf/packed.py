"""Weights in Q4_0 and Q8_0 in the format of compressed-tensors, with equal values.

Q4_0 may have negative scales: (integer - 8) * scale is (15 - integer - 7) * -scale, so such a group has zero point 7.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tandemrt.export.quantize.writer import Entry

GROUP = 32  # inputs per scale
PACKED = {"Q4_0": 4, "Q8_0": 8}  # type -> bits of an integer
_BLOCK_BYTES = {"Q4_0": 2 + GROUP // 2, "Q8_0": 2 + GROUP}  # a float16 scale, then the integers
_ROWS_PER_WORD = 8  # zero points of 4 bits

Rows = Callable[[], np.ndarray]  # the bytes of a weight, a row for each output


def can_pack(kind: str, shape: Sequence[int]) -> bool:
    """Whether a weight [outputs, inputs] of this type can be packed."""
    return kind in PACKED and len(shape) == 2 and (kind != "Q4_0" or shape[0] % _ROWS_PER_WORD == 0)


def pack(module: str, kind: str, shape: tuple[int, ...], data: Rows) -> Iterator[Entry]:
    """Yield the tensors of a weight [outputs, inputs] of ``module``."""
    rows, inner = shape
    bits, groups = PACKED[kind], inner // GROUP
    yield Entry(f"{module}.weight_packed", "int32", (rows, inner * bits // 32), partial(_integers, data, kind))
    yield Entry(f"{module}.weight_scale", "float16", (rows, groups), partial(_scales, data, kind))
    if kind == "Q4_0":
        words = (rows // _ROWS_PER_WORD, groups)
        yield Entry(f"{module}.weight_zero_point", "int32", words, partial(_zero_points, data))
    yield Entry(f"{module}.weight_shape", "int64", (2,), lambda: [np.array([rows, inner], np.int64).tobytes()])


def quantization_config(bits_of: Mapping[str, int], modules: Sequence[str]) -> dict[str, Any]:
    """Return the quantization_config: ``bits_of`` packed modules; the other ``modules`` are unquantized."""
    groups = {}
    for bits in sorted(set(bits_of.values())):
        weights = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": bits == 8}
        groups[f"group_{bits}"] = {
            "targets": [module for module, module_bits in bits_of.items() if module_bits == bits],
            "weights": weights | {"dynamic": False},
            "input_activations": None,
            "output_activations": None,
            "format": "pack-quantized",
        }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [module for module in modules if module not in bits_of],
        "kv_cache_scheme": None,
    }


def _blocks(data: Rows, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return float16 scales [outputs, groups] and bytes [outputs, groups, bytes]."""
    stored = np.ascontiguousarray(data())
    blocks = stored.reshape(len(stored), -1, _BLOCK_BYTES[kind])
    return np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0], blocks[:, :, 2:]


def _scales(data: Rows, kind: str) -> Iterator[bytes]:
    """Yield positive scales; a group of zeros has scale 1."""
    scales, _ = _blocks(data, kind)
    positive = np.abs(scales) if kind == "Q4_0" else scales
    yield np.where(scales == 0, np.float16(1), positive).tobytes()


def _integers(data: Rows, kind: str) -> Iterator[bytes]:
    """Yield unsigned integers, the first input in the lowest bits of a word."""
    scales, stored = _blocks(data, kind)
    zero = (scales == 0)[:, :, None]
    if kind == "Q8_0":
        yield np.where(zero, np.uint8(128), stored ^ np.uint8(128)).tobytes()
        return
    values = np.concatenate([stored & 15, stored >> 4], axis=2)  # byte i holds inputs i and i + 16
    values = np.where((scales < 0)[:, :, None], 15 - values, values)
    values = np.where(zero, np.uint8(8), values)
    yield np.ascontiguousarray(values[:, :, 0::2] | (values[:, :, 1::2] << 4)).tobytes()


def _zero_points(data: Rows) -> Iterator[bytes]:
    """Yield the zero points, the first of 8 outputs in the lowest bits of a word."""
    scales, _ = _blocks(data, "Q4_0")
    zeros = np.where(scales < 0, 7, 8).astype(np.uint32).reshape(-1, _ROWS_PER_WORD, scales.shape[1])
    shifts = 4 * np.arange(_ROWS_PER_WORD, dtype=np.uint32)[:, None]
    yield np.bitwise_or.reduce(zeros << shifts, axis=1).astype("<u4").tobytes()

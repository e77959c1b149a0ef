"""Read a weight that bitsandbytes stores in 4 bits: positions in a table of 16 floats, a scale per block of values.

Blocks are runs of the flattened matrix. A byte holds two positions, the first one in its high half. With double
quantization the scales are stored in 8 bits as well: positions in a table of 256, with scales of their own.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from tandemrt.engines.validation.errors import BadCheckpoint, clipped, quoted
from tandemrt.export.quantize.typed_tensors import find, typed
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.fields import Fields
from tandemrt.export.read.values import read_values

_STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")  # a JSON object, as bytes
TENSORS = (
    "weight",
    *(f"weight.{kind}" for kind in ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *_STATES)),
)


def table4_shape(module: str, tensors: Mapping[str, StoredTensor]) -> tuple[int, int]:
    """Return the outputs and inputs of the weight of ``module``. Raises BadCheckpoint for a malformed tensor."""
    state = _state(module, tensors)
    shape = state.get("shape")
    if not (isinstance(shape, list) and len(shape) == 2 and all(type(size) is int and size > 0 for size in shape)):
        raise BadCheckpoint(f"{module}: the shape in its quant_state should be two integers, it is {quoted(shape)}")
    return shape[0], shape[1]


def read_table4(module: str, tensors: Mapping[str, StoredTensor]) -> npt.NDArray[np.float32]:
    """Read the weight of ``module`` as float32 [outputs, inputs].

    Raises BadCheckpoint, by name, for tensors that do not fit.
    """
    shape, state = table4_shape(module, tensors), Fields(_state(module, tensors), f"{module}: quant_state")
    count, size = math.prod(shape), state.integer("blocksize")
    packed = read_values(typed(tensors, f"{module}.weight", (-(-count // 2), 1), ("uint8",))).reshape(-1)
    table = read_values(typed(tensors, f"{module}.weight.quant_map", (16,), ("float32",)))
    scales = _scales(module, tensors, state, -(-count // size))
    codes = np.stack([packed >> 4, packed & 15], axis=1).reshape(-1)[:count]
    return (table[codes] * scales.repeat(size)[:count]).reshape(shape)


def _scales(module: str, tensors: Mapping[str, StoredTensor], state: Fields, blocks: int) -> npt.NDArray[np.float32]:
    """Return the scale of each block of values."""
    nested = f"{module}.weight.nested_absmax" in tensors
    absmax = read_values(typed(tensors, f"{module}.weight.absmax", (blocks,), ("uint8" if nested else "float32",)))
    if not nested:
        return absmax
    size, offset = state.integer("nested_blocksize"), state.get("nested_offset")
    if isinstance(offset, bool) or not isinstance(offset, int | float):
        raise BadCheckpoint(f"{state.where}: nested_offset should be a number, it is {quoted(offset)}")
    table = read_values(typed(tensors, f"{module}.weight.nested_quant_map", (256,), ("float32",)))
    outer = read_values(typed(tensors, f"{module}.weight.nested_absmax", (-(-blocks // size),), ("float32",)))
    scales: npt.NDArray[np.float32] = table[absmax] * outer.repeat(size)[:blocks] + np.float32(offset)
    return scales


def _state(module: str, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    names = [f"{module}.weight.{state}" for state in _STATES]
    tensor = find(tensors, next((name for name in names if name in tensors), names[0]))
    try:
        state = json.loads(read_values(typed(tensors, tensor.name, (tensor.nbytes,), ("uint8",))).tobytes())
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(
            f"{tensor.file}: tensor {quoted(tensor.name)} should hold JSON: {clipped(error)}"
        ) from error
    if not isinstance(state, dict):
        raise BadCheckpoint(f"{tensor.file}: tensor {quoted(tensor.name)} should hold an object, it is {quoted(state)}")
    return state

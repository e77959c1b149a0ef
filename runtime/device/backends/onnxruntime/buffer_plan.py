"""Memory plan for the intermediate values of a decoder: a buffer is reused after the last read of its value."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.decoder import Decoder
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.validation.errors import InternalError

ALIGNMENT = 256  # bytes, as torch's allocator aligns


@dataclass(frozen=True)
class BufferPlan:
    """Buffers, and which value is in which one.

    Attributes:
        sizes: bytes of each buffer.
        buffer_of: index of the buffer of each value that has one.
        in_place_of: for each value that an operator writes in place, the value whose memory it shares.
    """

    sizes: tuple[int, ...]
    buffer_of: Mapping[str, int]
    in_place_of: Mapping[str, str]


def plan_buffers(decoder: Decoder, contract: Contract, largest: Sequence[Mapping[str, int]]) -> BufferPlan:
    """Assign a buffer to each intermediate value, large enough for each call of ``largest`` (sizes by symbol).

    No two live values share a buffer, and no step writes into a buffer that it reads. Inputs, outputs and constants
    have their own memory.
    """
    in_place_of = _homes(decoder)
    constants = decoder.constants.outputs if decoder.constants else ()
    elsewhere = {*constants, *(binding.name for binding in (*contract.inputs, *contract.outputs))}
    needed = {
        value.name: bytes_of(value.dtype, [_shape(value, call) for call in largest])
        for value in decoder.values
        if value.name not in in_place_of
    }
    last = {
        in_place_of.get(name, name): index for index, step in enumerate(decoder.steps) for name in step.inputs if name
    }
    sizes: list[int] = []
    buffer_of: dict[str, int] = {}
    free: list[int] = []
    for index, step in enumerate(decoder.steps):
        for name in step.outputs:
            if name in elsewhere or in_place_of.get(name, name) != name:
                continue
            buffer = _fitting(free, sizes, needed[name])
            if buffer is None:
                buffer = len(sizes)
                sizes.append(0)
            else:
                free.remove(buffer)
            sizes[buffer] = max(sizes[buffer], needed[name])
            buffer_of[name] = buffer
        free += [buffer_of[name] for name, end in last.items() if end == index and name in buffer_of]
        free += [buffer_of[name] for name in step.outputs if name in buffer_of and name not in last]
    return BufferPlan(tuple(sizes), buffer_of, in_place_of)


def bytes_of(dtype: str, shapes: Sequence[Sequence[int]]) -> int:
    """Bytes that suffice for a tensor of any of ``shapes``, rounded up to ALIGNMENT."""
    return -(-max(map(math.prod, shapes)) * BYTES[dtype] // ALIGNMENT) * ALIGNMENT


def _homes(decoder: Decoder) -> dict[str, str]:
    in_place_of: dict[str, str] = {}
    for step in decoder.operators:
        for output, source in step.in_place().items():
            in_place_of[output] = in_place_of.get(source, source)
    return in_place_of


def _shape(value: Binding, call: Mapping[str, int]) -> tuple[int, ...]:
    try:
        return value.resolve(call)
    except KeyError as error:
        raise InternalError(f"value {value}: its size depends on {error}, which no call sets") from error


def _fitting(free: Sequence[int], sizes: Sequence[int], needed: int) -> int | None:
    """The smallest free buffer that is large enough, else the largest one, which must grow; None if none is free."""
    enough = [buffer for buffer in free if sizes[buffer] >= needed]
    if enough:
        return min(enough, key=lambda buffer: sizes[buffer])
    return max(free, key=lambda buffer: sizes[buffer], default=None)

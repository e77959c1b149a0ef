"""Where the values between the steps of a decoder lie: memory that is used again as soon as nobody reads it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandemrt.engines.binding import Binding
from tandemrt.engines.contract import Contract
from tandemrt.engines.decoder import Decoder
from tandemrt.engines.dtypes import BYTES
from tandemrt.engines.errors import InternalError

ALIGNMENT = 256  # bytes, as torch's allocator gives them


@dataclass(frozen=True)
class Buffers:
    """``sizes``: bytes of every buffer. ``place``: the buffer of every value that has one.

    ``home``: for what an operator changes in place, the value whose memory it is.
    """

    sizes: tuple[int, ...]
    place: Mapping[str, int]
    home: Mapping[str, str]


def plan_buffers(decoder: Decoder, contract: Contract, largest: Sequence[Mapping[str, int]]) -> Buffers:
    """Give every value that steps pass on a buffer which holds it in each call of ``largest`` (sizes by symbol).

    No two values share one while either is still read, and what a step reads never lies where it writes. The tensors
    of the contract and constants have memory of their own.
    """
    home = _homes(decoder)
    constants = decoder.constants.outputs if decoder.constants else ()
    elsewhere = {*constants, *(binding.name for binding in (*contract.inputs, *contract.outputs))}
    needed = {
        value.name: bytes_of(value.dtype, [_shape(value, call) for call in largest])
        for value in decoder.values
        if value.name not in home
    }
    last = {home.get(name, name): index for index, step in enumerate(decoder.steps) for name in step.inputs if name}
    sizes: list[int] = []
    place: dict[str, int] = {}
    free: list[int] = []
    for index, step in enumerate(decoder.steps):
        for name in step.outputs:
            if name in elsewhere or home.get(name, name) != name:
                continue
            buffer = _fitting(free, sizes, needed[name])
            if buffer is None:
                buffer = len(sizes)
                sizes.append(0)
            else:
                free.remove(buffer)
            sizes[buffer] = max(sizes[buffer], needed[name])
            place[name] = buffer
        free += [place[name] for name, end in last.items() if end == index and name in place]
        free += [place[name] for name in step.outputs if name in place and name not in last]
    return Buffers(tuple(sizes), place, home)


def bytes_of(dtype: str, shapes: Sequence[Sequence[int]]) -> int:
    """Bytes that hold a tensor in each of ``shapes``, rounded up to ALIGNMENT."""
    return -(-max(map(math.prod, shapes)) * BYTES[dtype] // ALIGNMENT) * ALIGNMENT


def _homes(decoder: Decoder) -> dict[str, str]:
    home: dict[str, str] = {}
    for step in decoder.operators:
        for output, source in step.in_place().items():
            home[output] = home.get(source, source)
    return home


def _shape(value: Binding, call: Mapping[str, int]) -> tuple[int, ...]:
    try:
        return value.resolve(call)
    except KeyError as error:
        raise InternalError(f"value {value}: its size depends on {error}, which no call says") from error


def _fitting(free: Sequence[int], sizes: Sequence[int], needed: int) -> int | None:
    """The smallest free buffer that is large enough, else the largest, which then grows; None if none is free."""
    enough = [buffer for buffer in free if sizes[buffer] >= needed]
    if enough:
        return min(enough, key=lambda buffer: sizes[buffer])
    return max(free, key=lambda buffer: sizes[buffer], default=None)

"""What each rank of a tensor-parallel target runs: the calls that rank 0 commands.

A command is a header and, on CPUs, the inputs of a call. On GPUs the inputs go from device to device.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import EngineEntry
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.calls import largest_prompts
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.contract.operators import COLLECTIVES
from tandemrt.engines.validation.errors import InternalError
from tandemrt.plugins.operators.launch import Call
from tandemrt.plugins.operators.shared_ranks import SharedRanks
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.plugins.tensors.host_tensor import HostTensor
from tandemrt.runtime.device.backends.onnxruntime.buffer_plan import bytes_of
from tandemrt.runtime.device.backends.onnxruntime.executor import Executor, calls_of
from tandemrt.runtime.device.graphs import captured
from tandemrt.runtime.device.mapped_weights import MappedWeights
from tandemrt.runtime.device.streams import Streams
from tandemrt.runtime.workers.ranks import Link

if TYPE_CHECKING:
    from tandemrt.plugins.kernels.collectives import DeviceRanks

log = logging.getLogger(__name__)

HEADER_BYTES = 64 * 8
_ALIGNMENT = 64
_BOUND_CALLS = 256  # that a rank keeps, by shape
_RUNS_BEFORE_CAPTURE = 2  # in their first runs, engines choose kernels and grow their arenas
_CACHES = 2  # sets of caches that a rank keeps; a second one serves `tandemrt check`


class Action(IntEnum):
    """What a command asks for."""

    CALL = 1
    KEEP_STATES = 2
    RESTORE_STATES = 3


class Caches(NamedTuple):
    """A set of caches: its number, its ``blocks`` and, for recurrent layers, its ``slots``."""

    number: int
    blocks: int
    slots: int


class Header(NamedTuple):
    """The header of a command. ``graphed``: whether the call becomes a CUDA graph.

    ``sizes``: of a call the shapes of its inputs, one after the other; of another action the slot, and the number of
    the copy of its states.
    """

    action: Action
    graphed: bool
    caches: Caches
    sizes: tuple[int, ...]

    def to_array(self) -> np.ndarray:
        """Return the header as HEADER_BYTES bytes of int64; it is not all zeros."""
        values = [self.action, self.graphed, *self.caches, len(self.sizes), *self.sizes]
        array = np.zeros(HEADER_BYTES // 8, np.int64)
        array[: len(values)] = values
        return array

    @classmethod
    def from_bytes(cls, header: bytes) -> "Header":
        """Read a header."""
        action, graphed, number, blocks, slots, count, *sizes = np.frombuffer(header, np.int64).tolist()
        return cls(Action(action), bool(graphed), Caches(number, blocks, slots), tuple(sizes[:count]))


class GraphedCall:
    """Work on a GPU that, if ``graphed``, becomes a CUDA graph when it runs for the third time."""

    def __init__(self, device: torch.device, calls: Sequence[Call], graphed: bool) -> None:
        self._device = device_of(device)
        self._calls = calls
        self._runs_before_capture = _RUNS_BEFORE_CAPTURE if graphed else -1
        self._graph: Any = None

    def run(self) -> None:
        """Enqueue on the device's current stream."""
        if self._graph is None and self._runs_before_capture == 0:
            self._runs_before_capture = -1
            try:
                self._graph = captured(self._device, self._enqueue, waits=False)
            except Exception as error:  # torch, onnxruntime and cuda-core share no base class
                log.warning("the target of a rank cannot be captured and runs eagerly: %s", error)
        if self._graph is not None:
            self._graph.replay()
            return
        self._enqueue()
        self._runs_before_capture -= self._runs_before_capture > 0

    def _enqueue(self) -> None:
        for call in self._calls:
            call.run()


def serve_rank(link: Link, folder: str, first_device: str, threads: int) -> None:
    """Run the part of rank ``link.rank`` of the target in the bundle ``folder`` whenever rank 0 commands it."""
    bundle, device = Bundle.read(Path(folder)), device_of(torch.device(first_device)).numbered(link.rank)
    device_of(device).select()
    entry = bundle.manifest.ranks[link.rank - 1]
    streams, weights = Streams(device), MappedWeights(bundle)
    with streams.active():
        ranks = open_ranks(bundle, entry, device, SharedRanks(link.rank, link.parts, link.arrived))
        executor = Executor.open(bundle, entry, device, threads, dict, ranks)
        weights.watch()
        calls = RankCalls(bundle, entry, executor)
        link.opened()
        link.run_commands(calls.run)


class RankCalls:
    """The calls of another rank than 0, by the header of their commands."""

    def __init__(self, bundle: Bundle, entry: EngineEntry, executor: Executor) -> None:
        self._contract = entry.contract
        self._device = executor.device
        self._executor = executor
        self._inputs = published(entry.contract)
        self._logits = torch.empty(_most_logits(bundle, entry.contract), dtype=torch.uint8, device=self._device)
        self._received = None
        if not device_of(self._device).on_host:
            size = input_bytes(bundle, entry.contract)
            self._received = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._caches = lru_cache(_CACHES)(self._new_caches)
        self._call = lru_cache(_BOUND_CALLS)(self._bound)
        self._memory = np.empty(0, np.uint8)

    def run(self, command: np.ndarray) -> None:
        """Run the call of ``command``; on a CPU, its inputs are in the same memory for every command."""
        self._memory = command
        self._call(command[:HEADER_BYTES].tobytes()).run()

    def _bound(self, header: bytes) -> Call:
        action, graphed, caches, sizes = Header.from_bytes(header)
        rank_caches = self._caches(caches)
        if action is not Action.CALL:
            slot, place = sizes
            return StatesCall(rank_caches, slot, place, restores=action is Action.RESTORE_STATES)
        left = list(sizes)
        shapes = [tuple(left.pop(0) for _ in binding.shape) for binding in self._inputs]
        nbytes = [prod(shape) * BYTES[b.dtype] for b, shape in zip(self._inputs, shapes, strict=True)]
        places, end = packed(nbytes)
        memory = HostTensor(self._memory[HEADER_BYTES:]) if self._received is None else self._received
        if end > memory.numel():
            raise InternalError(f"bind: inputs of {shapes} are larger than {memory.numel()} bytes")
        tensors = {}
        for binding, shape, begin, size in zip(self._inputs, shapes, places, nbytes, strict=True):
            tensors[binding.name] = viewed(memory[begin : begin + size], getattr(torch, binding.dtype)).view(shape)
        logits = self._contract["logits"]
        shape = (*tensors["score_rows"].shape, int(logits.shape[-1]))
        dtype = getattr(torch, logits.dtype)
        out = viewed(self._logits[: prod(shape) * dtype.itemsize], dtype).view(shape)
        steps = self._executor.bind({**tensors, **rank_caches.tensors, "logits": out})
        if self._received is None:
            return steps
        from tandemrt.plugins.kernels.collectives import receive

        received = receive(self._executor.context, {"memory": self._received[:end]})
        return GraphedCall(self._device, [received, steps], graphed)

    def _new_caches(self, caches: Caches) -> "HeldCaches":
        cache_tensors, states = {}, []
        for _, source in self._contract.aliases:
            binding = self._contract[source]
            shape = binding.resolve({"blocks": caches.blocks, "slots": caches.slots})
            cache_tensors[source] = torch.zeros(shape, dtype=getattr(torch, binding.dtype), device=self._device)
            states += [cache_tensors[source]] if is_state(binding) else []
        return HeldCaches(cache_tensors, states)


@dataclass(frozen=True)
class HeldCaches:
    """A rank's set of caches. ``states``: those of recurrent layers, and ``copies`` of states of one slot by number."""

    tensors: dict[str, torch.Tensor]
    states: Sequence[torch.Tensor]
    copies: dict[int, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class StatesCall:
    """Copies the states of ``slot`` to the copy number ``place``, or back; see SplitEngine."""

    caches: HeldCaches
    slot: int
    place: int
    restores: bool

    def run(self) -> None:
        """Run on the device's current stream."""
        if not self.restores:
            self.caches.copies[self.place] = [state[self.slot].clone() for state in self.caches.states]
            return
        for state, copy in zip(self.caches.states, self.caches.copies[self.place], strict=True):
            state[self.slot].copy_(copy)


def open_ranks(
    bundle: Bundle, entry: EngineEntry, device: torch.device, shared: SharedRanks
) -> "SharedRanks | DeviceRanks":
    """Return this process among the ranks, on ``device``."""
    if device_of(device).on_host:
        return shared
    from tandemrt.plugins.kernels.collectives import DeviceRanks

    return DeviceRanks(shared, device, most_bytes(bundle, entry), input_bytes(bundle, entry.contract))


def packed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the first byte of consecutive arrays of ``sizes`` bytes, and the end of the last."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end = -(-(end + size) // _ALIGNMENT) * _ALIGNMENT
    return places, end


def published(contract: Contract) -> list[Binding]:
    """Return the inputs of a call, which rank 0 publishes."""
    cache_names = {source for _, source in contract.aliases}
    return [binding for binding in contract.inputs if binding.name not in cache_names]


def is_state(binding: Binding) -> bool:
    """Whether ``binding`` has the states of a recurrent layer."""
    return "slots" in binding.shape


def input_bytes(bundle: Bundle, contract: Contract) -> int:
    """Return the bytes of the inputs of the largest call."""
    prompts = largest_prompts(bundle.limits.batch, bundle.limits.prefill_chunk)
    counts = {"prompt_tokens": prompts.prompt_tokens, "prompts": prompts.prompts, "prompts+1": prompts.prompts + 1}
    largest = [{**counts, **call} for call in calls_of(bundle)]
    sizes = [bytes_of(each.dtype, [each.resolve(call) for call in largest]) for each in published(contract)]
    return sum(sizes)


def most_bytes(bundle: Bundle, entry: EngineEntry) -> int:
    """Return the bytes of the largest part that ranks exchange."""
    assert entry.decoder is not None
    bindings = entry.decoder.bindings(entry.contract)
    parts = [bindings[str(step.inputs[0])] for step in entry.decoder.operators if step.name in COLLECTIVES]
    return max(bytes_of(part.dtype, [part.resolve(call) for call in calls_of(bundle)]) for part in parts)


def _most_logits(bundle: Bundle, contract: Contract) -> int:
    """Return the bytes of the largest logits."""
    logits = contract["logits"]
    return max(prod(logits.resolve(call)) for call in calls_of(bundle)) * BYTES[logits.dtype]

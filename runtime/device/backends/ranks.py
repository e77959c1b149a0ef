"""A target that several processes run together (tensor parallelism), each with its part of the weights and caches.

Rank 0 owns requests, sampling and the draft, and binds the target's calls as for one process. Before it runs a call, it
publishes the call's inputs in memory that all ranks see. The other ranks run the same steps on their parts. All of a
decoder's steps end with a collective operator, so a rank has read all inputs when rank 0 ends a call.
"""

import os
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path

import numpy as np

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import Engine
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.calls import largest_prompts
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.contract.operators import COLLECTIVES
from tandemrt.engines.validation.errors import BackendUnavailable, InternalError, RankFailed, named
from tandemrt.plugins.operators.launch import Call
from tandemrt.plugins.operators.shared_ranks import SharedRanks, shared_bytes
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.host_tensor import HostTensor, array_of
from tandemrt.runtime.device.backends.buffer_plan import bytes_of
from tandemrt.runtime.device.backends.executor import Executor, calls_of
from tandemrt.runtime.device.backends.shared_weights import Initializers
from tandemrt.runtime.device.mapped_weights import MappedWeights
from tandemrt.runtime.workers.ranks import Link, RankProcesses

_HEADER = 64  # int64 values: 1, the number of the caches, their blocks, and the shapes of the inputs
_ALIGNMENT = 64
_BOUND_CALLS = 256  # that a rank keeps, by shape
_CACHES = 2  # sets of caches that a rank keeps; a second one serves `tandemrt check`


class RankedEngine:
    """Rank 0's part of a target, which runs the other ranks with it."""

    capturable = False

    def __init__(self, executor: Executor, processes: RankProcesses) -> None:
        self.contract = executor.contract
        self.device = executor.device
        self._executor = executor
        self._processes = processes
        self._inputs = _published(executor.contract)
        self._caches: dict[int, int] = {}  # number by address
        weakref.finalize(self, processes.close).atexit = False

    @classmethod
    def open(cls, bundle: Bundle, device: torch.device, threads: int | None, shared: Initializers) -> "RankedEngine":
        """Start the other ranks, and open the target of ``bundle`` on all.

        Raises as Executor.open does, and RankFailed if another rank cannot open its part.
        """
        if device.type != "cpu":
            raise BackendUnavailable(
                f"device: a target with tensor_parallel runs on a CPU alone so far, received {str(device)!r}; use "
                "device='cpu', or build the bundle without tensor_parallel"
            )
        entry, count = bundle.engine("target"), 1 + len(bundle.manifest.ranks)
        threads = threads or max(1, (os.cpu_count() or 1) // count)
        processes = RankProcesses(
            count,
            serve_rank,
            (str(bundle.folder), threads),
            shared_bytes(count, _most_bytes(bundle, entry)),
            _command_bytes(bundle, entry.contract),
        )
        try:
            ranks = SharedRanks(0, processes.parts, processes.arrived, processes.require)
            executor = Executor.open(bundle, entry, device, threads, shared, ranks)
            processes.wait_until_opened()
        except BaseException:
            processes.close()
            raise
        return cls(executor, processes)

    def bind(self, tensors: Mapping[str, torch.Tensor], *, filters: bool = True) -> "RankedCall":
        """See Engine.bind."""
        steps = self._executor.bind(tensors, filters=filters)
        cache = tensors[self.contract.aliases[0][1]]
        number = self._caches.setdefault(cache.data_ptr(), len(self._caches))
        inputs = [array_of(tensors[binding.name]) for binding in self._inputs]
        shapes = [size for array in inputs for size in array.shape]
        header = np.zeros(_HEADER, np.int64)
        header[: 3 + len(shapes)] = [1, number, cache.shape[0], *shapes]
        return RankedCall(self._processes, steps, [header, *inputs])


class RankedCall:
    """A call of the target on rank 0. ``published``: what the other ranks read to run it, too."""

    def __init__(self, processes: RankProcesses, steps: Call, published: Sequence[np.ndarray]) -> None:
        self._processes = processes
        self._steps = steps
        self._published = published

    def run(self) -> None:
        """Run the call on all ranks. Raises RankFailed if a rank fails, and for all later calls."""
        self._processes.command(self._write)
        try:
            self._steps.run()
        except RankFailed:
            raise
        except BaseException as error:  # the other ranks wait for parts that will not come
            self._processes.fail(f"rank 0 failed: {named(error)}")
            self._processes.require()

    def _write(self, memory: np.ndarray) -> None:
        places = _views(memory, [(array.dtype, array.shape) for array in self._published])
        for place, array in zip(places, self._published, strict=True):
            place[...] = array


def serve_rank(link: Link, folder: str, threads: int) -> None:
    """Run the part of rank ``link.rank`` of the target in the bundle ``folder`` whenever rank 0 commands it."""
    bundle, device = Bundle.read(Path(folder)), torch.device("cpu")
    entry = bundle.manifest.ranks[link.rank - 1]
    weights = MappedWeights(bundle)
    ranks = SharedRanks(link.rank, link.parts, link.arrived)
    executor = Executor.open(bundle, entry, device, threads, {}, ranks)
    weights.watch()
    inputs = _published(entry.contract)
    logits = torch.empty(_most_logits(bundle, entry.contract), dtype=torch.uint8, device=device)

    @lru_cache(_CACHES)
    def caches(number: int, blocks: int) -> dict[str, torch.Tensor]:  # noqa: ARG001
        found = {}
        for _, source in entry.contract.aliases:
            binding = entry.contract[source]
            shape, dtype = binding.resolve({"blocks": blocks}), getattr(torch, binding.dtype)
            found[source] = torch.zeros(shape, dtype=dtype, device=device)
        return found

    @lru_cache(_BOUND_CALLS)
    def bound(header: bytes) -> Call:
        _, number, blocks, *sizes = np.frombuffer(header, np.int64).tolist()
        shapes = [tuple(sizes.pop(0) for _ in binding.shape) for binding in inputs]
        typed = [(np.dtype(binding.dtype), shape) for binding, shape in zip(inputs, shapes, strict=True)]
        _, *views = _views(np.frombuffer(link.commands, np.uint8), [(np.dtype(np.int64), (_HEADER,)), *typed])
        tensors = {binding.name: HostTensor(view) for binding, view in zip(inputs, views, strict=True)}
        shape = (*tensors["score_rows"].shape, int(entry.contract["logits"].shape[-1]))
        dtype = getattr(torch, entry.contract["logits"].dtype)
        out = logits[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        return executor.bind({**tensors, **caches(number, blocks), "logits": out})

    link.opened()
    link.run_commands(lambda command: bound(command[: _HEADER * 8].tobytes()).run())


def _published(contract: Contract) -> list[Binding]:
    held = {source for _, source in contract.aliases}
    return [binding for binding in contract.inputs if binding.name not in held]


def _views(memory: np.ndarray, typed: Sequence[tuple[np.dtype, tuple[int, ...]]]) -> list[np.ndarray]:
    """Consecutive arrays of these dtypes and shapes in ``memory``. Raises InternalError if it is too small."""
    found, end = [], 0
    for dtype, shape in typed:
        begin, end = end, end + prod(shape) * dtype.itemsize
        if end > len(memory):
            raise InternalError(f"bind: a call of {[shape for _, shape in typed]} is larger than {len(memory)} bytes")
        found.append(memory[begin:end].view(dtype).reshape(shape))
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
    return found


def _command_bytes(bundle: Bundle, contract: Contract) -> int:
    """Bytes of the largest command."""
    prompts = largest_prompts(bundle.limits.batch, bundle.limits.prefill_chunk)
    counts = {"prompt_tokens": prompts.prompt_tokens, "prompts": prompts.prompts, "prompts+1": prompts.prompts + 1}
    largest = [{**counts, **call} for call in calls_of(bundle)]
    sizes = [bytes_of(each.dtype, [each.resolve(call) for call in largest]) for each in _published(contract)]
    return sum(sizes) + _HEADER * 8


def _most_bytes(bundle: Bundle, entry: Engine) -> int:
    """Bytes of the largest part that ranks exchange."""
    assert entry.decoder is not None
    bindings = entry.decoder.bindings(entry.contract)
    parts = [bindings[str(step.inputs[0])] for step in entry.decoder.operators if step.name in COLLECTIVES]
    return max(bytes_of(part.dtype, [part.resolve(call) for call in calls_of(bundle)]) for part in parts)


def _most_logits(bundle: Bundle, contract: Contract) -> int:
    """Bytes of the largest logits."""
    logits = contract["logits"]
    return max(prod(logits.resolve(call)) for call in calls_of(bundle)) * BYTES[logits.dtype]

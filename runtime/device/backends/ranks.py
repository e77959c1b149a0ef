"""A target that several processes run together (tensor parallelism), each with its part of the weights and caches.

Rank 0 owns requests, sampling and the draft, and binds the target's calls as for one process. Before it runs a call, it
publishes the call's inputs in memory that all ranks see. The other ranks run the same steps on their parts. A decoder
ends with a collective operator, so a rank has read all inputs when rank 0 ends a call.

On GPUs the inputs go from device to device. The host of rank 0 tells the hosts of the others only the shapes of a call,
and no host waits for a device.
"""

import logging
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import Engine
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.calls import MAX_GRAPH_TOKENS, largest_prompts
from tandemrt.engines.contract.contract import Contract
from tandemrt.engines.contract.dtypes import BYTES
from tandemrt.engines.contract.operators import COLLECTIVES
from tandemrt.engines.validation.errors import BackendUnavailable, InternalError, RankFailed, named
from tandemrt.plugins.operators.launch import Call
from tandemrt.plugins.operators.shared_ranks import SharedRanks, shared_bytes
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.plugins.tensors.host_tensor import HostTensor, array_of
from tandemrt.runtime.device.backends.buffer_plan import bytes_of
from tandemrt.runtime.device.backends.executor import Executor, calls_of
from tandemrt.runtime.device.backends.shared_weights import Initializers
from tandemrt.runtime.device.graphs import captured
from tandemrt.runtime.device.mapped_weights import MappedWeights
from tandemrt.runtime.device.streams import Streams
from tandemrt.runtime.workers.ranks import Link, RankProcesses

if TYPE_CHECKING:
    from tandemrt.plugins.kernels.collectives import DeviceRanks

log = logging.getLogger(__name__)

# int64 values: 1, whether to use CUDA graphs, number and blocks of the caches, shapes of the inputs
_HEADER = 64
_ALIGNMENT = 64
_BOUND_CALLS = 256  # that a rank keeps, by shape
_AHEAD = 32  # commands that rank 0 may write before a GPU's host has enqueued the first of them
_HANDLE_BYTES = 64  # that ranks exchange on the host when GPUs exchange the parts
_RUNS_BEFORE_CAPTURE = 2  # in their first runs, engines choose kernels and grow their arenas
# Operators, and what needs them: these ran over several ranks on CPUs alone.
NOT_ON_GPUS = {
    "scaled_matmul": "weights in float8",
    "float8_matmul": "weights in float8",
    "int4_matmul": "weights in 4 bits",
    "experts": "experts",
    "latent_attention": "latent attention",
    "linear_attention": "recurrent layers",
    "short_convolution": "recurrent layers",
}
_CACHES = 2  # sets of caches that a rank keeps; a second one serves `tandemrt check`


class RankedEngine:
    """Rank 0's part of a target, which runs the other ranks with it."""

    capturable = False  # its calls have graphs of their own, because each run also tells the other ranks on the host

    def __init__(self, executor: Executor, processes: RankProcesses, *, cuda_graphs: bool) -> None:
        self._cuda_graphs = cuda_graphs
        self.contract = executor.contract
        self.device = executor.device
        self._executor = executor
        self._processes = processes
        self._inputs = _published(executor.contract)
        self._caches: dict[int, int] = {}  # number by address
        self._ended: Any = None  # an event after the last call
        if self.device.type == "cuda":
            self._ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
            processes.idle = self._ended.query
        weakref.finalize(self, processes.close).atexit = False

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        device: torch.device,
        threads: int | None,
        shared: Initializers,
        *,
        cuda_graphs: bool = True,
    ) -> "RankedEngine":
        """Start the other ranks, and open the target of ``bundle`` on all.

        On GPUs, rank r has the r-th after ``device``. Raises as Executor.open and require_on_gpus do,
        BackendUnavailable if there are too few GPUs, and RankFailed if another rank cannot open its part.
        """
        entry, count = bundle.engine("target"), 1 + len(bundle.manifest.ranks)
        on_gpu = device.type == "cuda"
        if on_gpu and (device.index or 0) + count > (found := torch.cuda.device_count()):
            raise BackendUnavailable(
                f"device: a target over {count} ranks needs as many GPUs from {str(device)!r} on, torch finds {found} "
                "here in all; use another device, or build the bundle with a smaller tensor_parallel"
            )
        if on_gpu:
            require_on_gpus(entry)
        threads = threads or max(1, (os.cpu_count() or 1) // count)
        processes = RankProcesses(
            count,
            serve_rank,
            (str(bundle.folder), str(device), threads),
            shared_bytes(count, _HANDLE_BYTES if on_gpu else _most_bytes(bundle, entry)),
            _HEADER * 8 + (0 if on_gpu else _input_bytes(bundle, entry.contract)),
            ahead=_AHEAD if on_gpu else 1,
        )
        try:
            ranks = _ranks(bundle, entry, device, SharedRanks(0, processes.parts, processes.arrived, processes.require))
            if not isinstance(ranks, SharedRanks):
                processes.on_failure = ranks.abort
            executor = Executor.open(bundle, entry, device, threads, shared, ranks)
            processes.wait_until_opened()
        except BaseException:
            processes.close()
            raise
        return cls(executor, processes, cuda_graphs=cuda_graphs)

    def bind(self, tensors: Mapping[str, torch.Tensor], *, filters: bool = True) -> "RankedCall":
        """See Engine.bind."""
        steps = self._executor.bind(tensors, filters=filters)
        cache = tensors[self.contract.aliases[0][1]]
        number = self._caches.setdefault(cache.data_ptr(), len(self._caches))
        inputs = {binding.name: tensors[binding.name] for binding in self._inputs}
        sizes = [size for tensor in inputs.values() for size in tensor.shape]
        header = np.zeros(_HEADER, np.int64)
        tokens = len(tensors["token_ids"])
        graphed = self._cuda_graphs and tokens <= MAX_GRAPH_TOKENS
        header[: 4 + len(sizes)] = [1, graphed, number, cache.shape[0], *sizes]
        if self.device.type == "cpu":
            return RankedCall(self._processes, steps, [header, *map(array_of, inputs.values())], None)
        from tandemrt.plugins.kernels.collectives import publish

        places, _ = _packed([each.nbytes for each in inputs.values()])
        published = publish(self._executor.context, inputs, places)
        return RankedCall(self._processes, GraphedCall([published, steps], graphed), [header], self._ended)

    def check(self) -> None:
        """Raise RankFailed if a rank has failed, so that the results of earlier calls may be wrong."""
        self._processes.require()


class RankedCall:
    """A call of the target on rank 0.

    ``command``: what the other ranks need to run it, too. ``ended``: an event to record at the end, if there is one.
    """

    def __init__(self, processes: RankProcesses, work: Call, command: Sequence[np.ndarray], ended: Any) -> None:
        self._ended = ended
        self._processes = processes
        self._work = work
        self._command = command

    def run(self) -> None:
        """Run the call on all ranks. Raises RankFailed if a rank fails, and for all later calls."""
        self._processes.command(self._write)
        try:
            self._work.run()
            if self._ended is not None:
                self._ended.record()
        except RankFailed:
            raise
        except BaseException as error:  # the other ranks wait for parts that will not come
            self._processes.fail(f"rank 0 failed: {named(error)}")
            self._processes.require()

    def _write(self, memory: np.ndarray) -> None:
        places, _ = _packed([each.nbytes for each in self._command])
        for array, begin in zip(self._command, places, strict=True):
            memory[begin : begin + array.nbytes] = array.reshape(-1).view(np.uint8)


class GraphedCall:
    """Work on a GPU that, if ``graphed``, becomes a CUDA graph when it runs for the third time."""

    def __init__(self, calls: Sequence[Call], graphed: bool) -> None:
        self._calls = calls
        self._runs_before_capture = _RUNS_BEFORE_CAPTURE if graphed else -1
        self._graph: Any = None

    def run(self) -> None:
        """Enqueue on the device's current stream."""
        if self._graph is None and self._runs_before_capture == 0:
            self._runs_before_capture = -1
            try:
                self._graph = captured(self._enqueue, waits=False)
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
    bundle, device = Bundle.read(Path(folder)), torch.device(first_device)
    if device.type == "cuda":
        device = torch.device("cuda", (device.index or 0) + link.rank)
        torch.cuda.set_device(device)
    entry = bundle.manifest.ranks[link.rank - 1]
    streams, weights = Streams(device), MappedWeights(bundle)
    with streams.active():
        ranks = _ranks(bundle, entry, device, SharedRanks(link.rank, link.parts, link.arrived))
        executor = Executor.open(bundle, entry, device, threads, {}, ranks)
        weights.watch()
        calls = RankCalls(bundle, entry, executor)
        link.opened()
        link.run_commands(calls.run)


class RankCalls:
    """The calls of another rank than 0, by the header of their commands."""

    def __init__(self, bundle: Bundle, entry: Engine, executor: Executor) -> None:
        self._contract = entry.contract
        self._device = executor.device
        self._executor = executor
        self._inputs = _published(entry.contract)
        self._logits = torch.empty(_most_logits(bundle, entry.contract), dtype=torch.uint8, device=self._device)
        self._received = None
        if self._device.type == "cuda":
            size = _input_bytes(bundle, entry.contract)
            self._received = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._caches = lru_cache(_CACHES)(self._new_caches)
        self._call = lru_cache(_BOUND_CALLS)(self._bound)
        self._memory = np.empty(0, np.uint8)

    def run(self, command: np.ndarray) -> None:
        """Run the call of ``command``; on a CPU, its inputs are in the same memory for every command."""
        self._memory = command
        self._call(command[: _HEADER * 8].tobytes()).run()

    def _bound(self, header: bytes) -> Call:
        _, graphed, number, blocks, *sizes = np.frombuffer(header, np.int64).tolist()
        shapes = [tuple(sizes.pop(0) for _ in binding.shape) for binding in self._inputs]
        nbytes = [prod(shape) * BYTES[b.dtype] for b, shape in zip(self._inputs, shapes, strict=True)]
        places, end = _packed(nbytes)
        memory = HostTensor(self._memory[_HEADER * 8 :]) if self._received is None else self._received
        if end > memory.numel():
            raise InternalError(f"bind: inputs of {shapes} are larger than {memory.numel()} bytes")
        tensors = {}
        for binding, shape, begin, size in zip(self._inputs, shapes, places, nbytes, strict=True):
            tensors[binding.name] = viewed(memory[begin : begin + size], getattr(torch, binding.dtype)).view(shape)
        logits = self._contract["logits"]
        shape = (*tensors["score_rows"].shape, int(logits.shape[-1]))
        dtype = getattr(torch, logits.dtype)
        out = viewed(self._logits[: prod(shape) * dtype.itemsize], dtype).view(shape)
        steps = self._executor.bind({**tensors, **self._caches(number, blocks), "logits": out})
        if self._received is None:
            return steps
        from tandemrt.plugins.kernels.collectives import receive

        received = receive(self._executor.context, {"memory": self._received[:end]})
        return GraphedCall([received, steps], bool(graphed))

    def _new_caches(self, number: int, blocks: int) -> dict[str, torch.Tensor]:  # noqa: ARG002
        found = {}
        for _, source in self._contract.aliases:
            binding = self._contract[source]
            shape, dtype = binding.resolve({"blocks": blocks}), getattr(torch, binding.dtype)
            found[source] = torch.zeros(shape, dtype=dtype, device=self._device)
        return found


def _ranks(bundle: Bundle, entry: Engine, device: torch.device, shared: SharedRanks) -> "SharedRanks | DeviceRanks":
    """This process among the ranks, on ``device``."""
    if device.type == "cpu":
        return shared
    from tandemrt.plugins.kernels.collectives import DeviceRanks

    return DeviceRanks(shared, device, _most_bytes(bundle, entry), _input_bytes(bundle, entry.contract))


def require_on_gpus(entry: Engine) -> None:
    """Raise BackendUnavailable for a target that several ranks run on CPUs alone so far."""
    assert entry.decoder is not None
    found = {NOT_ON_GPUS[step.name] for step in entry.decoder.operators if step.name in NOT_ON_GPUS}
    if found:
        raise BackendUnavailable(
            f"device: a target over several ranks with {' and '.join(sorted(found))} ran on CPUs only and is rejected "
            "on GPUs; build the bundle without tensor_parallel or from an unquantized dense checkpoint"
        )


def _packed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The first byte of consecutive arrays of ``sizes`` bytes, and the end of the last."""
    places, end = [], 0
    for size in sizes:
        places.append(end)
        end = -(-(end + size) // _ALIGNMENT) * _ALIGNMENT
    return places, end


def _published(contract: Contract) -> list[Binding]:
    held = {source for _, source in contract.aliases}
    return [binding for binding in contract.inputs if binding.name not in held]


def _input_bytes(bundle: Bundle, contract: Contract) -> int:
    """Bytes of the inputs of the largest call."""
    prompts = largest_prompts(bundle.limits.batch, bundle.limits.prefill_chunk)
    counts = {"prompt_tokens": prompts.prompt_tokens, "prompts": prompts.prompts, "prompts+1": prompts.prompts + 1}
    largest = [{**counts, **call} for call in calls_of(bundle)]
    sizes = [bytes_of(each.dtype, [each.resolve(call) for call in largest]) for each in _published(contract)]
    return sum(sizes)


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

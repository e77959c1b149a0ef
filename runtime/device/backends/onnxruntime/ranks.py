"""A target that several processes run together (tensor parallelism), each with its part of the weights and caches.

Rank 0 owns requests, sampling and the draft, and binds the target's calls as for one process. Before it runs a call, it
publishes the call's inputs in memory that all ranks see. The other ranks run the same steps on their parts. A decoder
ends with a collective operator, so a rank has read all inputs when rank 0 ends a call.

On GPUs the inputs go from device to device. The host of rank 0 tells the hosts of the others only the shapes of a call,
and no host waits for a device.
"""

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.validation.errors import BackendUnavailable, RankFailed, named
from tandemrt.plugins.operators.launch import Call
from tandemrt.plugins.operators.shared_ranks import SharedRanks, shared_bytes
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of, gpus
from tandemrt.plugins.tensors.host_tensor import array_of
from tandemrt.runtime.device.backends.onnxruntime.executor import Executor
from tandemrt.runtime.device.backends.onnxruntime.rank_calls import (
    HEADER_BYTES,
    Action,
    Caches,
    GraphedCall,
    Header,
    input_bytes,
    is_state,
    most_bytes,
    open_ranks,
    packed,
    published,
    serve_rank,
)
from tandemrt.runtime.device.backends.onnxruntime.shared_weights import Initializers
from tandemrt.runtime.workers.ranks import RankProcesses

_AHEAD = 32  # commands that rank 0 may write before a GPU's host has enqueued the first of them
_MAX_GRAPH_TOKENS = 1024  # of a call: ranks were never measured with graphs of larger ones
_HANDLE_BYTES = 64  # that ranks exchange on the host when GPUs exchange the parts


class RankedEngine:
    """Rank 0's part of a target, which runs the other ranks with it."""

    capturable = False  # its calls have graphs of their own, because each run also tells the other ranks on the host

    def __init__(self, executor: Executor, processes: RankProcesses, *, cuda_graphs: bool) -> None:
        self._cuda_graphs = cuda_graphs
        self.contract = executor.contract
        self.device = executor.device
        self._executor = executor
        self._processes = processes
        self._inputs = published(executor.contract)
        self._numbers: dict[int, int] = {}  # of caches, by address
        self._ended = device_of(self.device).new_event()  # after the last call
        if self._ended is not None:
            processes.idle = self._ended.query
        weakref.finalize(self, processes.close).atexit = False

    @classmethod
    def open(
        cls,
        bundle: Bundle,
        device: torch.device,
        threads: int | None,
        shared: Callable[[], Initializers],
        *,
        cuda_graphs: bool = True,
    ) -> "RankedEngine":
        """Start the other ranks, and open the target of ``bundle`` on all; ``shared``: see Executor.open.

        On GPUs, rank r has the r-th after ``device``. Raises as Executor.open does, BackendUnavailable if there are
        too few GPUs, and RankFailed if another rank cannot open its part.
        """
        entry, count = bundle.engine("target"), 1 + len(bundle.manifest.ranks)
        on_gpu = not device_of(device).on_host
        if on_gpu and (device.index or 0) + count > (num_gpus := len(gpus())):
            raise BackendUnavailable(
                f"device: a target over {count} ranks needs as many GPUs from {str(device)!r} on, torch finds "
                f"{num_gpus} here in all; use another device, or build the bundle with a smaller tensor_parallel"
            )
        threads = threads or max(1, (os.cpu_count() or 1) // count)
        processes = RankProcesses(
            count,
            serve_rank,
            (str(bundle.folder), str(device), threads),
            shared_bytes(count, _HANDLE_BYTES if on_gpu else most_bytes(bundle, entry)),
            HEADER_BYTES + (0 if on_gpu else input_bytes(bundle, entry.contract)),
            ahead=_AHEAD if on_gpu else 1,
        )
        try:
            ranks = open_ranks(
                bundle, entry, device, SharedRanks(0, processes.parts, processes.arrived, processes.require)
            )
            if not isinstance(ranks, SharedRanks):
                processes.on_failure.append(ranks.abort)
            executor = Executor.open(bundle, entry, device, threads, shared, ranks)
            processes.wait_until_opened()
        except BaseException:
            processes.close()
            raise
        return cls(executor, processes, cuda_graphs=cuda_graphs)

    def bind(self, tensors: Mapping[str, torch.Tensor], *, needs_probs: bool = True) -> "RankedCall":
        """See Engine.bind."""
        steps = self._executor.bind(tensors, needs_probs=needs_probs)
        inputs = {binding.name: tensors[binding.name] for binding in self._inputs}
        graphed = self._cuda_graphs and len(tensors["token_ids"]) <= _MAX_GRAPH_TOKENS
        sizes = tuple(size for tensor in inputs.values() for size in tensor.shape)
        header = Header(Action.CALL, graphed, self._caches_of(tensors), sizes).to_array()
        if self._ended is None:
            return RankedCall(self._processes, steps, [header, *map(array_of, inputs.values())], None)
        from tandemrt.plugins.kernels.collectives import publish

        places, _ = packed([each.nbytes for each in inputs.values()])
        sent = publish(self._executor.context, inputs, places)
        return RankedCall(self._processes, GraphedCall(self.device, [sent, steps], graphed), [header], self._ended)

    def keep_states(self, caches: Mapping[str, torch.Tensor], slot: int, place: int) -> None:
        """See SplitEngine."""
        self._command(Header(Action.KEEP_STATES, False, self._caches_of(caches), (slot, place)))

    def restore_states(self, caches: Mapping[str, torch.Tensor], slot: int, place: int) -> None:
        """See SplitEngine."""
        self._command(Header(Action.RESTORE_STATES, False, self._caches_of(caches), (slot, place)))

    def on_failure(self, call: Callable[[BaseException], None]) -> None:
        """See CheckedEngine."""
        self._processes.on_failure.append(call)

    def end_waits(self, overdue: Callable[[], bool]) -> None:
        """See CheckedEngine."""
        self._processes.overdue = overdue

    @property
    def problem(self) -> str | None:
        """See CheckedEngine."""
        return self._processes.problem

    def check(self) -> None:
        """Raise RankFailed if a rank has failed, so that the results of earlier calls may be wrong."""
        self._processes.require()

    def _command(self, header: Header) -> None:
        self._processes.command(_writer([header.to_array()]))

    def _caches_of(self, tensors: Mapping[str, torch.Tensor]) -> Caches:
        """Return the set of caches that ``tensors`` are, by its address."""
        bindings = [self.contract[source] for _, source in self.contract.aliases]
        slots = next((len(tensors[binding.name]) for binding in bindings if is_state(binding)), 0)
        blocks = next(len(tensors[binding.name]) for binding in bindings if not is_state(binding))
        address = tensors[bindings[0].name].data_ptr()
        return Caches(self._numbers.setdefault(address, len(self._numbers)), blocks, slots)


class RankedCall:
    """A call of the target on rank 0.

    ``command``: what the other ranks need to run it, too. ``ended``: an event to record at the end, if there is one.
    """

    def __init__(self, processes: RankProcesses, work: Call, command: Sequence[np.ndarray], ended: Any) -> None:
        self._ended = ended
        self._processes = processes
        self._work = work
        self._write = _writer(command)

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


def _writer(command: Sequence[np.ndarray]) -> Callable[[np.ndarray], None]:
    """Return what writes the values of contiguous arrays into the memory of a command."""
    begins, _ = packed([each.nbytes for each in command])
    values = [each.reshape(-1).view(np.uint8) for each in command]
    parts = [(begin, begin + len(each), each) for begin, each in zip(begins, values, strict=True)]

    def write(memory: np.ndarray) -> None:
        for begin, end, each in parts:
            memory[begin:end] = each

    return write

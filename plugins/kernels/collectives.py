"""Ranks of a tensor-parallel target on GPUs: memory that all of them map, and the operators over it.

Peers read each other's memory directly (CUDA IPC). Multicast objects are never made.
"""

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from cuda.bindings import runtime

from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.plugins.kernels.module import HOPPER, KernelModule, Launch, Tensors, current_stream, suffix
from tandemrt.plugins.operators.launch import Context
from tandemrt.plugins.operators.launch import Tensors as RuntimeTensors
from tandemrt.plugins.operators.shared_ranks import SharedRanks
from tandemrt.plugins.tensors.devices.lookup import device_of

_SLOTS = 16384  # bytes of counters and flags, as in collectives.cu
_MOST_BLOCKS, _THREADS, _PUBLISHERS = 128, 512, 8
_VECTOR = 16  # bytes
_HANDLE = 64  # bytes of a cudaIpcMemHandle_t
# Bytes from which on two shots are faster, from three ranks on: two ranks read as much either way. Equal bits.
BY_RANGES_FROM = 1 << 18
# Bytes up to which lines are faster, for two ranks: a line takes twice the bytes, and goes to every other rank.
LINES_TO = 1 << 20
_ONCE, _RANGES, _LINES = 0, 1, 2  # ways to add, as in collectives.cu
UNITS = {16: "128", 4: "32", 2: "16"}  # bytes that all_gather copies at a time: the kernel's suffix


class DeviceRanks:
    """This process among the ranks of ``shared``, with memory of every rank's GPU mapped.

    ``most``: bytes of the largest part. ``inputs``: bytes of the largest call's inputs. ``aborted``: a flag in host
    memory; kernels that wait for other ranks return once it is not 0, with undefined results.
    """

    def __init__(self, shared: SharedRanks, device: torch.device, most: int, inputs: int) -> None:
        self.rank, self.count = shared.rank, shared.count
        self.device = device
        self.most = -(-most // 256) * 256
        self.most_by_lines = LINES_TO // (self.count - 1) // 256 * 256
        self._lines = 2 * self.most_by_lines  # bytes of the lines of one rank
        nbytes = _SLOTS + 2 * self.most + 2 * self.count * self._lines + inputs
        self.aborted = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._abort = self.aborted.numpy()
        gpu = device_of(device)
        with gpu.on_device():
            gpu.synchronize()  # creates torch's context
            own = _made(runtime.cudaMalloc(nbytes))
            _made(runtime.cudaMemset(own, 0, nbytes))
            _made(runtime.cudaDeviceSynchronize())
            handles = [bytes(part) for part in shared.exchange(np.frombuffer(_handle(own), np.uint8))]
            addresses = [own if rank == self.rank else _opened(handle) for rank, handle in enumerate(handles)]
            weakref.finalize(self, _release, own, [each for each in addresses if each != own]).atexit = False
            self.memory = torch.tensor(addresses, dtype=torch.int64, device=device)
            _made(runtime.cudaDeviceSynchronize())
        shared.exchange(np.zeros(1, np.uint8))  # all flags are zero before a rank raises one

    def abort(self, _error: BaseException | None = None) -> None:
        """Let waiting kernels return, because a rank has failed."""
        self._abort[0] = 1

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The first arguments of every kernel."""
        sizes = np.int64(self.most), np.int64(self._lines)
        return self.memory, np.int32(self.rank), np.int32(self.count), self.aborted, *sizes


class CollectiveCall:
    """One bound launch. Capturable: a run allocates nothing and reads nothing on the host."""

    def __init__(self, device: torch.device, launch: Launch, keep: Sequence[Any] = ()) -> None:
        self._keep = keep  # the launch has their addresses alone
        self._device = device
        self._launch = launch

    def run(self) -> None:
        """Enqueue on torch's current stream."""
        self._launch.run(current_stream(self._device))


def launch_all_reduce(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Any:  # noqa: ARG001
    """Bind ``all_reduce``; see Launcher in plugins/operators/launch.py."""
    x, total = tensors["x"], tensors["sum"]
    if context.ranks is None:
        return _Copy(x, total)
    ranks = _of(context)
    if x.nbytes % _VECTOR or x.nbytes > ranks.most:
        raise ValueError(
            f"x: a multiple of {_VECTOR} and at most {ranks.most} bytes are needed, got {tuple(x.shape)} of {x.dtype}"
        )
    vectors = x.nbytes // _VECTOR
    module = KernelModule.of(context, "collectives")
    kernel = module.kernel(f"all_reduce_early_{suffix(x)}")  # older bundles have one that must not begin early
    way, spread = _ONCE, vectors
    if x.nbytes <= ranks.most_by_lines:
        way, spread = _LINES, 2 * vectors
    elif ranks.count > 2 and x.nbytes >= BY_RANGES_FROM:
        way, spread = _RANGES, vectors // ranks.count
    arguments = (*ranks.arguments, x, np.int64(vectors), np.int32(way), total)
    early = module.architecture >= HOPPER
    launch = Launch(kernel, _grid(module, spread), (_THREADS, 1, 1), *arguments, early=early)
    return CollectiveCall(ranks.device, launch)


def launch_all_gather(tensors: Tensors, attributes: Mapping[str, Any], context: Context) -> Any:
    """Bind ``all_gather``; see Launcher in plugins/operators/launch.py."""
    x, gathered, width = tensors["x"], tensors["gathered"], int(attributes["width"])
    if context.ranks is None:
        return _Copy(x, gathered)
    ranks, part = _of(context), x.shape[-1]
    if x.nbytes > ranks.most or gathered.shape[-1] != width:
        raise ValueError(f"x: at most {ranks.most} bytes are needed, got {tuple(x.shape)} of {x.dtype}")
    item = x.element_size()
    begins = [min(rank * part, width - part) * item for rank in range(ranks.count)]
    unit = next(size for size in UNITS if all(place % size == 0 for place in (*begins, part * item, width * item)))
    module = KernelModule.of(context, "collectives")
    kernel = module.kernel(f"all_gather_{UNITS[unit]}")
    sizes = (np.int32(x.numel() // part), np.int32(part * item // unit), np.int32(width * item // unit))
    arguments = (*ranks.arguments, x, *sizes, gathered)
    return CollectiveCall(ranks.device, Launch(kernel, _grid(module, x.nbytes // unit), (_THREADS, 1, 1), *arguments))


def publish(context: Context, tensors: RuntimeTensors, places: Sequence[int]) -> CollectiveCall:
    """Bind, on rank 0, the copy of the inputs of a call to ``places`` (bytes) that the other ranks ``receive``."""
    ranks = _of(context)
    entries = [
        [each.data_ptr(), place, each.nbytes]
        for each, place in zip(tensors.values(), places, strict=True)
        if each.nbytes
    ]
    # from pinned memory: another copy would wait for all work before it
    table = torch.tensor(entries, dtype=torch.int64).pin_memory().to(ranks.device, non_blocking=True)
    kernel = KernelModule.of(context, "collectives").kernel("publish")
    arguments = (*ranks.arguments, table, np.int32(len(entries)))
    launch = Launch(kernel, (_PUBLISHERS, 1, 1), (_THREADS, 1, 1), *arguments)
    return CollectiveCall(ranks.device, launch, keep=list(tensors.values()))


def receive(context: Context, tensors: RuntimeTensors) -> CollectiveCall:
    """Bind, on another rank than 0, the wait for the next inputs and their copy to the tensor ``memory``."""
    ranks, memory = _of(context), tensors["memory"]
    vectors = -(-memory.nbytes // _VECTOR)
    kernel = KernelModule.of(context, "collectives").kernel("receive")
    arguments = (*ranks.arguments, memory, np.int64(vectors), np.int32(_PUBLISHERS))
    return CollectiveCall(ranks.device, Launch(kernel, (_PUBLISHERS, 1, 1), (_THREADS, 1, 1), *arguments))


class _Copy:
    """A collective operator of one rank."""

    def __init__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._x, self._out = x, out

    def run(self) -> None:
        self._out.copy_(self._x)


def _of(context: Context) -> DeviceRanks:
    assert isinstance(context.ranks, DeviceRanks)
    return context.ranks


def _grid(module: KernelModule, units: int) -> tuple[int, int, int]:
    """Thread blocks that all run at the same time, because they wait for those of other GPUs."""
    return max(1, min(_MOST_BLOCKS, module.sm_count, -(-units // _THREADS))), 1, 1


def _handle(address: int) -> bytes:
    return ctypes.string_at(_made(runtime.cudaIpcGetMemHandle(address)).getPtr(), _HANDLE)


def _opened(handle: bytes) -> int:
    memory_handle = runtime.cudaIpcMemHandle_t()
    ctypes.memmove(memory_handle.getPtr(), handle, _HANDLE)
    return int(_made(runtime.cudaIpcOpenMemHandle(memory_handle, runtime.cudaIpcMemLazyEnablePeerAccess)))


def _release(own: int, others: Sequence[int]) -> None:
    for each in others:
        runtime.cudaIpcCloseMemHandle(each)
    runtime.cudaFree(own)


def _made(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status != runtime.cudaError_t.cudaSuccess:
        raise BackendUnavailable(
            f"tensor_parallel: GPUs of one host that map each other's memory (CUDA IPC) are needed: {status.name}"
        )
    return values[0] if values else None

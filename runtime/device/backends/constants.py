"""Constants of a decoder: weights, read from files, and other values, computed once.

Weights are copied to the device in chunks, so that the host never holds a complete one: those of a mixture of experts
may exceed its memory.
"""

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from tandemrt.engines.contract.dtypes import BYTES, from_onnx
from tandemrt.engines.parallel import map_in_threads
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.plugins.onnxruntime.sessions import place
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.plugins.tensors.host_tensor import HostTensor
from tandemrt.runtime.device.backends.sessions import CPU, bindings, onnxruntime, open_session

_READERS, _CHUNK_BYTES = 8, 1 << 22  # threads, and bytes that each reads at a time


def read_constants(path: Path, device: "torch.device") -> dict[str, "torch.Tensor"]:
    """Compute the outputs of a graph without inputs, on ``device``. Raises as open_session; BadBundle if truncated."""
    stored = stored_parts(path)
    tensors = map_in_threads(lambda parts: _read_tensor(parts, device), stored.values(), _READERS)
    read = dict(zip(stored, tensors, strict=True))
    return {name: tensor.to(device) for name, tensor in _computed(path, read).items()} | read


def constants_of(session: "onnxruntime.InferenceSession") -> dict[str, "torch.Tensor"]:
    """Compute the outputs of a session without inputs, as host tensors."""
    binding = session.io_binding()
    tensors = {}
    for b in bindings(session.get_outputs()):
        tensors[b.name] = torch.empty(b.resolve({}), dtype=getattr(torch, b.dtype))
        binding.bind_output(b.name, *place(tensors[b.name]))
    session.run_with_iobinding(binding)
    return tensors


def _computed(path: Path, read: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    """Compute the outputs that are not ``read``, from a graph without the others: a session copies all it has."""
    model = ir.load(path)
    graph = model.graph
    for at in reversed(range(len(graph.outputs))):
        if graph.outputs[at].name in read:
            graph.outputs.pop(at)
    if not graph.outputs:
        return {}
    RemoveUnusedNodesPass()(model)
    content = ir.to_proto(model).SerializeToString()
    folder = {"session.model_external_initializers_file_folder_path": str(path.parent)}
    # Unoptimized, because constant folding would compute and copy the values once more.
    return constants_of(open_session(path, [CPU], content=content, entries=folder, optimized=False))


def stored_parts(path: Path) -> dict[str, list[ir.ExternalTensor]]:
    """Find the outputs of a graph that are external tensors or concatenations of them; not scalars."""
    found = {}
    for value in ir.load(path).graph.outputs:
        node = value.producer()
        joined = node is not None and node.op_type == "Concat" and node.attributes.get_int("axis") == 0
        if node is None or not (joined or node.op_type == "Identity"):
            continue
        parts = [None if each is None else each.const_value for each in node.inputs]
        if all(isinstance(part, ir.ExternalTensor) and part.shape.rank() for part in parts):
            found[str(value.name)] = [part for part in parts if isinstance(part, ir.ExternalTensor)]
    return found


class _HostCopies:
    """Copies of a buffer into parts of a host tensor, one after another."""

    def __init__(self) -> None:
        self._buffer = np.empty(_CHUNK_BYTES, np.uint8)

    def buffer(self) -> "np.ndarray[Any, Any]":
        """Return the buffer to fill before the next copy."""
        return self._buffer

    def copy(self, to: "torch.Tensor") -> None:
        """Copy the beginning of the buffer to ``to``."""
        source: Any = HostTensor(self._buffer[: to.numel()])
        to.copy_(source)

    def finish(self) -> None:
        """Wait for all copies."""


class _CudaCopies:
    """The same to a GPU, from two buffers in turns in pinned memory: one is filled while the other is copied."""

    def __init__(self, device: "torch.device") -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pinned = [torch.zeros(_CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._copied: list[Any] = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def buffer(self) -> "np.ndarray[Any, Any]":
        self._copied[self._turn].synchronize()
        buffer: np.ndarray[Any, Any] = self._pinned[self._turn].numpy()
        return buffer

    def copy(self, to: "torch.Tensor") -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(self._pinned[self._turn][: to.numel()], non_blocking=True)
            self._copied[self._turn].record()
        self._turn = 1 - self._turn

    def finish(self) -> None:
        self._stream.synchronize()


def _read_tensor(parts: list[ir.ExternalTensor], device: "torch.device") -> "torch.Tensor":
    shapes = [tuple(int(str(dim)) for dim in part.shape.dims) for part in parts]
    dtype = from_onnx(int(parts[0].dtype))
    memory = torch.empty(sum(map(prod, shapes)) * BYTES[dtype], dtype=torch.uint8, device=device)
    copies, end = _CudaCopies(device) if device.type == "cuda" else _HostCopies(), 0
    for part, shape in zip(parts, shapes, strict=True):
        with Path(part.path).open("rb", buffering=0) as file:
            file.seek(part.offset or 0)
            begin, end = end, end + prod(shape) * BYTES[dtype]
            while begin < end:
                count = file.readinto(copies.buffer()[: end - begin].data)
                if not count:
                    raise BadBundle(f"{part.path}: is shorter than its graph requires; build the bundle again")
                copies.copy(memory[begin : begin + count])
                begin += count
    copies.finish()
    joined: torch.Tensor = viewed(memory, getattr(torch, dtype))
    return joined.view(sum(shape[0] for shape in shapes), *shapes[0][1:])

"""Constants of a decoder: weights, read from files, and other values, computed once.

Weights are copied to the device in chunks, so that the host never holds a complete one: those of a mixture of experts
may exceed its memory.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from tandemrt.engines.parallel.threads import map_in_threads
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.plugins.onnxruntime.sessions import place
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.devices.lookup import device_of
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.plugins.tensors.host_tensor import HostTensor
from tandemrt.runtime.device.backends.onnxruntime.sessions import CPU, bindings, onnxruntime, open_session
from tandemrt.runtime.device.backends.onnxruntime.stored_graph import (
    StoredWeight,
    keep_outputs,
    load_graph,
    stored_tensor,
)

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
    model = load_graph(path)
    left = [each.name for each in model.graph.output if each.name not in read]
    if not left:
        return {}
    keep_outputs(model.graph, left)
    content = model.SerializeToString()
    folder = {"session.model_external_initializers_file_folder_path": str(path.parent)}
    # Unoptimized, because constant folding would compute and copy the values once more.
    return constants_of(open_session(path, [CPU], content=content, entries=folder, optimized=False))


def stored_parts(path: Path) -> dict[str, list[StoredWeight]]:
    """Find the outputs of a graph that are weights in files or concatenations of them; not scalars."""
    graph = load_graph(path).graph
    weights = {each.name: stored_tensor(each, path.parent) for each in graph.initializer}
    producers = {name: node for node in graph.node for name in node.output}
    parts_of_outputs = {}
    for output in graph.output:
        node = producers.get(output.name)
        if node is None or not (node.op_type == "Identity" or _joins_rows(node)):
            continue
        parts = [weights.get(name) for name in node.input]
        stored = [part for part in parts if part is not None and part.shape]
        if len(stored) == len(parts):
            parts_of_outputs[output.name] = stored
    return parts_of_outputs


def _joins_rows(node: onnx.NodeProto) -> bool:
    return node.op_type == "Concat" and any(each.name == "axis" and each.i == 0 for each in node.attribute)


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


class _PinnedCopies:
    """The same to a GPU, from two buffers in turns in pinned memory: one is filled while the other is copied."""

    def __init__(self, device: "torch.device") -> None:
        self._device = device_of(device)
        self._stream = self._device.new_stream()
        self._pinned = [self._device.host_zeros(_CHUNK_BYTES, dtype=torch.uint8) for _ in range(2)]
        self._copied = [self._device.new_event() for _ in range(2)]
        self._turn = 0

    def buffer(self) -> "np.ndarray[Any, Any]":
        self._copied[self._turn].synchronize()
        buffer: np.ndarray[Any, Any] = self._pinned[self._turn].numpy()
        return buffer

    def copy(self, to: "torch.Tensor") -> None:
        with self._device.on_stream(self._stream):
            to.copy_(self._pinned[self._turn][: to.numel()], non_blocking=True)
            self._copied[self._turn].record()
        self._turn = 1 - self._turn

    def finish(self) -> None:
        self._stream.synchronize()


def _read_tensor(parts: list[StoredWeight], device: "torch.device") -> "torch.Tensor":
    dtype, columns = parts[0].dtype, parts[0].shape[1:]
    memory = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8, device=device)
    copies, end = _HostCopies() if device_of(device).on_host else _PinnedCopies(device), 0
    for part in parts:
        with part.path.open("rb", buffering=0) as file:
            file.seek(part.offset)
            begin, end = end, end + part.nbytes
            while begin < end:
                count = file.readinto(copies.buffer()[: end - begin].data)
                if not count:
                    raise BadBundle(f"{part.path}: is shorter than its graph requires; build the bundle again")
                copies.copy(memory[begin : begin + count])
                begin += count
    copies.finish()
    joined: torch.Tensor = viewed(memory, getattr(torch, dtype))
    return joined.view(sum(part.shape[0] for part in parts), *columns)

"""What the operators of a decoder read that depends on no input: weights as they lie in files, the rest computed once.

A weight goes from its file to the device part by part, so that the host holds none of them whole: those of a mixture of
experts may be larger than its memory.
"""

from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from tandemrt.engines.dtypes import BYTES, from_onnx
from tandemrt.engines.errors import BadBundle
from tandemrt.plugins.host_tensor import HostTensor
from tandemrt.plugins.sessions import place
from tandemrt.plugins.tensors import torch, viewed
from tandemrt.runtime.backends.sessions import CPU, bindings, onnxruntime, open_session

_READING, _BYTES = 4, 1 << 24  # tensors at a time, and bytes of each


def read_constants(path: Path, device: "torch.device") -> dict[str, "torch.Tensor"]:
    """What a graph without inputs gives, on ``device``. Raises as open_session does, BadBundle for a cut file."""
    stored = stored_parts(path)
    with ThreadPoolExecutor(_READING) as pool:
        read = dict(zip(stored, pool.map(lambda parts: _joined(parts, device), stored.values()), strict=True))
    # All of the rest may be constants to onnxruntime, which would compute and copy them once more to optimize them.
    computed = constants_of(open_session(path, [CPU], optimized=False), without=read)
    return {name: tensor.to(device) for name, tensor in computed.items()} | read


def constants_of(
    session: "onnxruntime.InferenceSession", *, without: "dict[str, torch.Tensor] | None" = None
) -> dict[str, "torch.Tensor"]:
    """What a session without inputs gives, as host tensors; nothing is computed for those ``without``."""
    binding = session.io_binding()
    tensors = {}
    for b in bindings(session.get_outputs()):
        if b.name not in (without or ()):
            tensors[b.name] = torch.empty(b.resolve({}), dtype=getattr(torch, b.dtype))
            binding.bind_output(b.name, *place(tensors[b.name]))
    options = onnxruntime.RunOptions()
    options.only_execute_path_to_fetches = True
    if tensors:
        session.run_with_iobinding(binding, options)
    return tensors


def stored_parts(path: Path) -> dict[str, list[ir.ExternalTensor]]:
    """The outputs of the graph in ``path`` that are tensors of files, or several one behind the other; no scalars."""
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


def _joined(parts: list[ir.ExternalTensor], device: "torch.device") -> "torch.Tensor":
    shapes = [tuple(int(str(dim)) for dim in part.shape.dims) for part in parts]
    dtype = from_onnx(int(parts[0].dtype))
    memory = torch.empty(sum(map(prod, shapes)) * BYTES[dtype], dtype=torch.uint8, device=device)
    buffer, end = np.empty(_BYTES, np.uint8), 0
    for part, shape in zip(parts, shapes, strict=True):
        with Path(part.path).open("rb", buffering=0) as file:
            file.seek(part.offset or 0)
            begin, end = end, end + prod(shape) * BYTES[dtype]
            while begin < end:
                count = file.readinto(buffer[: end - begin].data)
                if not count:
                    raise BadBundle(f"{part.path}: is shorter than its graph says; build the bundle again")
                source: Any = buffer[:count]
                source = HostTensor(source) if device.type == "cpu" else torch.from_numpy(source)
                memory[begin : begin + count].copy_(source)
                begin += count
    whole: torch.Tensor = viewed(memory, getattr(torch, dtype))
    return whole.view(sum(shape[0] for shape in shapes), *shapes[0][1:])

"""Graphs that are equal but for the names of their values and their vectors, such as the norms of all layers.

They can share a session: onnxruntime needs a tenth of a second for each, and a decoder has two norms per layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from tandemrt.engines.contract.dtypes import from_onnx
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.runtime.device.backends.onnxruntime.stored_graph import StoredWeight, load_graph, stored_tensor, values

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)


@dataclass(frozen=True)
class RenamedGraph:
    """``content``: a graph whose vectors are inputs. ``names``: the new names of its inputs and outputs, by old ones.

    ``vectors``: those weights on the device, by new names. Equal graphs have equal ``content``.
    """

    content: bytes
    names: Mapping[str, str]
    vectors: Mapping[str, torch.Tensor]


def renamed_graph(path: Path, device: torch.device) -> RenamedGraph | None:
    """Rename the graph in ``path``; None if it has no weights, or others than vectors in files and of floats.

    Raises BadBundle if a file of weights is too short.
    """
    model = load_graph(path)
    graph = model.graph
    vectors = {each.name: vector for each in graph.initializer if (vector := _vector(each, path.parent)) is not None}
    if not vectors or len(vectors) < len(graph.initializer):
        return None
    own = [each.name for each in (*graph.input, *graph.output)]
    names = {name: f"value{number}" for number, name in enumerate(values(graph))}
    graph.input.extend(
        onnx.helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in graph.initializer
    )
    del graph.initializer[:]
    for each in (*graph.input, *graph.output, *graph.value_info):
        each.name = names[each.name]
    for node in graph.node:
        node.name = ""
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    graph.name = "shared"
    return RenamedGraph(
        model.SerializeToString(deterministic=True),
        {name: names[name] for name in own},
        {names[name]: _read(vector, device) for name, vector in vectors.items()},
    )


def _vector(initializer: onnx.TensorProto, folder: Path) -> StoredWeight | onnx.TensorProto | None:
    """Return the weight if it is a vector: in a file, or with several floats in the graph, as joined biases are."""
    if len(initializer.dims) != 1:
        return None
    stored = stored_tensor(initializer, folder)
    if stored is None and initializer.raw_data and initializer.dims[0] > 1 and initializer.data_type in _FLOATS:
        return initializer
    return stored


def _read(vector: StoredWeight | onnx.TensorProto, device: torch.device) -> torch.Tensor:
    if isinstance(vector, onnx.TensorProto):
        content, dtype = np.frombuffer(vector.raw_data, np.uint8).copy(), from_onnx(vector.data_type)
    else:
        content, dtype = np.fromfile(vector.path, np.uint8, vector.nbytes, offset=vector.offset), vector.dtype
        if content.size < vector.nbytes:
            raise BadBundle(f"{vector.path}: is shorter than its graph requires; build the bundle again")
    read: torch.Tensor = viewed(torch.from_numpy(content).to(device), getattr(torch, dtype))
    return read

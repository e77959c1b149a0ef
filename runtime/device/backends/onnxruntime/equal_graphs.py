"""Graphs that are equal but for the names of their values and their vectors, such as the norms of all layers.

They can share a session: onnxruntime needs a tenth of a second for each, and a decoder has two norms per layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from tandemrt.engines.validation.errors import BadBundle
from tandemrt.plugins.tensors import torch
from tandemrt.plugins.tensors.dtypes import viewed
from tandemrt.runtime.device.backends.onnxruntime.stored_graph import StoredWeight, load_graph, stored_tensor, values


@dataclass(frozen=True)
class RenamedGraph:
    """``content``: a graph whose vectors are inputs. ``names``: the new names of its inputs and outputs, by old ones.

    ``vectors``: those weights on the device, by new names. Equal graphs have equal ``content``.
    """

    content: bytes
    names: Mapping[str, str]
    vectors: Mapping[str, torch.Tensor]


def renamed_graph(path: Path, device: torch.device) -> RenamedGraph | None:
    """Rename the graph in ``path``; None if it has no weights, or other weights than vectors in files.

    Raises BadBundle if a file of weights is too short.
    """
    model = load_graph(path)
    graph = model.graph
    weights = {each.name: stored_tensor(each, path.parent) for each in graph.initializer}
    vectors = {name: weight for name, weight in weights.items() if weight is not None and len(weight.shape) == 1}
    if not weights or len(vectors) < len(weights):
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


def _read(stored: StoredWeight, device: torch.device) -> torch.Tensor:
    content = np.fromfile(stored.path, np.uint8, stored.nbytes, offset=stored.offset)
    if content.size < stored.nbytes:
        raise BadBundle(f"{stored.path}: is shorter than its graph requires; build the bundle again")
    read: torch.Tensor = viewed(torch.from_numpy(content).to(device), getattr(torch, stored.dtype))
    return read
